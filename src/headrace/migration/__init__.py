"""The settings of other engines, as tables. `headrace.other_engines` reads them, `settings` says what a row is."""

"""The settings of other engines, as tables. `headrace.other_engines` reads them, `settings` defines a row."""

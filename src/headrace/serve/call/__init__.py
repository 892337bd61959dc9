"""What a call asks for and what it gets, as far as the APIs share it: schema, parsing, forms, answers."""

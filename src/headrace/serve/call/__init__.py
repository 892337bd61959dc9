"""The part of a request that the APIs share: schema, parsing, forms, dialect and names of parameters."""

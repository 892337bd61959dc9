"""The HTTP server. `app` puts it together; `gates/` stand before every route, `apis/` has one folder for an ecosystem.

Others use `app.create_app` and `app.serve`.
"""

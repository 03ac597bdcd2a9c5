"""The database: tables, engines, the unit of work, migrations."""

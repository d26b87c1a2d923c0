"""What marks a file as a tuning database."""

APPLICATION_ID = 0x66614154  # "faAT", SQLite's application_id of our files
SCHEMA_VERSION = 3  # SQLite's user_version: the number of the newest migration

"""Programs to run and to read: each is one file, data at the top, table and figure at the end."""

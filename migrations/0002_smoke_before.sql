-- What a smoke run is compared with, and with what it was run.
ALTER TABLE smoke_run ADD COLUMN subject TEXT NOT NULL DEFAULT '';          -- '': an engine in this program; else the URL of a server
ALTER TABLE smoke_run ADD COLUMN mode TEXT NOT NULL DEFAULT '';             -- configured speculation
ALTER TABLE smoke_run ADD COLUMN warning TEXT NOT NULL DEFAULT '';          -- why it passed and all the same is not as it should be
ALTER TABLE smoke_run ADD COLUMN previous_version TEXT NOT NULL DEFAULT ''; -- started_by 'upgrade': the version that ran before
ALTER TABLE smoke_run ADD COLUMN before_runs INTEGER NOT NULL DEFAULT 0;    -- earlier runs that it was compared with
ALTER TABLE smoke_run ADD COLUMN before_tokens_per_second REAL NOT NULL DEFAULT 0;
ALTER TABLE smoke_run ADD COLUMN before_acceptance REAL NOT NULL DEFAULT 0;

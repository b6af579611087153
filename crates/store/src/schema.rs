//! The tables, and how an older database becomes one of today.

use rusqlite::{Connection, Result, Transaction, TransactionBehavior};

/// Marks the file as ours: `GPUP`.
pub(crate) const APPLICATION_ID: u32 = 0x4750_5550;

/// One step per schema, oldest first: number `n` turns schema `n` into `n + 1`. Never change one that was released.
const MIGRATIONS: &[fn(&Transaction<'_>) -> Result<()>] = &[first, clock, leases, notes];

/// The schema of today.
pub(crate) const VERSION: u32 = MIGRATIONS.len() as u32;

/// Brings a database of schema `from` to that of today, each step all or nothing.
pub(crate) fn migrate(connection: &mut Connection, from: u32) -> Result<()> {
    for (step, version) in MIGRATIONS.iter().zip(1_u32..).skip(from as usize) {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        step(&transaction)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", version)?;
        transaction.commit()?;
    }
    Ok(())
}

fn first(transaction: &Transaction<'_>) -> Result<()> {
    transaction.execute_batch(
        "
        -- What the pool keeps: the last row about each thing.
        CREATE TABLE rows (
            kind TEXT NOT NULL,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (kind, key)
        ) WITHOUT ROWID;

        -- The audit trail: records are added, and removed when they are old, never changed. Times are ms since 1970.
        CREATE TABLE history (
            seq INTEGER PRIMARY KEY,
            lease INTEGER NOT NULL,
            event TEXT NOT NULL CHECK (event IN ('granted', 'ended')),
            at INTEGER NOT NULL,
            owner TEXT NOT NULL,
            worker_id TEXT,
            devices TEXT NOT NULL,
            token INTEGER,
            cause TEXT,
            granted_at INTEGER,
            ended_at INTEGER,
            UNIQUE (lease, event)
        );
        CREATE INDEX history_by_time ON history (at);
        CREATE INDEX history_by_owner ON history (owner, at);

        -- Who may use the API; the secret itself is known to its holder only.
        CREATE TABLE tokens (
            id INTEGER PRIMARY KEY,
            hash BLOB NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            admin INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            revoked_at INTEGER
        );
        ",
    )
}

fn clock(transaction: &Transaction<'_>) -> Result<()> {
    transaction.execute_batch(
        "
        -- An instant on the pool's clock and on the wall, and which start of the machine it belongs to.
        CREATE TABLE clock (
            one INTEGER PRIMARY KEY CHECK (one = 1),
            boot TEXT NOT NULL,
            ahead INTEGER NOT NULL,
            pool INTEGER NOT NULL,
            wall INTEGER NOT NULL
        );
        ",
    )
}

/// Leases get a table of their own: their numbers only grow, so a new one touches the last page and no other.
fn leases(transaction: &Transaction<'_>) -> Result<()> {
    transaction.execute_batch(
        "
        CREATE TABLE leases (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        INSERT INTO leases (id, value) SELECT CAST(key AS INTEGER), value FROM rows
            WHERE kind = 'lease' AND key = CAST(CAST(key AS INTEGER) AS TEXT);
        DELETE FROM rows WHERE kind = 'lease' AND key = CAST(CAST(key AS INTEGER) AS TEXT);
        ",
    )
}

fn notes(transaction: &Transaction<'_>) -> Result<()> {
    transaction.execute_batch(
        "
        -- Batches of rows, each on a page of its own and all of one length, so that to note one writes one page.
        CREATE TABLE notes (place INTEGER PRIMARY KEY, number INTEGER NOT NULL, batch TEXT NOT NULL);
        -- The number of the last one that the other tables have heard of.
        CREATE TABLE heard (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL);
        ",
    )
}

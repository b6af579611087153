//! Opening a database: the lock, checks before the first write, the schema, the generation, and reading all rows.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use gpupool_core::PoolRow;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Transaction, TransactionBehavior};

use crate::error::StoreError;
use crate::lease_store::row_key;
use crate::limits::{LOCK_WAIT, LOG_BYTES, MAX_ROW_WARNINGS};

use super::buffer::WriteAheadBuffer;
use super::commit::transact;
use super::disk::{BallastFile, StateDirLock, extend_log};
use super::trail::DeviceNames;
use super::{SqliteStore, encode_error, execute};

impl SqliteStore {
    /// Opens the store in a state directory for writing, and creates both if they are missing.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        // Other users reach the agent's socket in the directory; the files are private to the agent.
        DirBuilder::new().recursive(true).mode(0o711).create(dir).map_err(|source| StoreError::File {
            path: dir.to_owned(),
            doing: "create the directory",
            source,
        })?;
        let lock = StateDirLock::acquire(dir)?;
        let file = dir.join("pool.db");
        check_header(&file)?;
        let mut connection = connect(&file)?;
        prepare(&mut connection, &file)?;
        let unreadable = |what| StoreError::Corrupt { file: file.clone(), what };
        let buffer =
            WriteAheadBuffer::read(&connection).map_err(|source| unusable(&file, source))?.map_err(unreadable)?;
        let ballast = BallastFile::new(dir);
        let generation = begin_generation(&mut connection, &ballast).map_err(|source| unusable(&file, source))?;
        extend_log(&file);
        let mut warnings = Vec::new();
        if let Err(error) = ballast.fill() {
            warnings.push(format!("no ballast in {}, so releases fail on a full disk: {error}", dir.display()));
        }
        let device_names = DeviceNames::new();
        Ok(Self { connection, file, ballast, buffer, device_names, generation, warnings, _lock: lock })
    }
}

/// Creates the file if it is missing, and refuses one whose header belongs to another program.
fn check_header(path: &Path) -> Result<(), StoreError> {
    let fail = |doing| move |source| StoreError::File { path: path.to_owned(), doing, source };
    let mut open = OpenOptions::new();
    let mut file = match open.read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return create_file(path).map_err(fail("create")),
        opened => opened.map_err(fail("open"))?,
    };
    let mut header = Vec::new();
    Read::by_ref(&mut file).take(100).read_to_end(&mut header).map_err(fail("read"))?;
    if header.is_empty() {
        return Ok(());
    }
    if header.len() < 100 || !header.starts_with(b"SQLite format 3\0") {
        return Err(StoreError::Corrupt { file: path.to_owned(), what: "it is not a database".into() });
    }
    let number = |at: usize| header[at..at + 4].iter().fold(0, |number, byte| number << 8 | u32::from(*byte));
    match number(68) {
        // The header may still be in the log; `check_database` checks it.
        0 => Ok(()),
        APPLICATION_ID => check_version(path, number(60)),
        found => Err(StoreError::NotOurs { file: path.to_owned(), found }),
    }
}

fn create_file(path: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.sync_all()?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn check_version(file: &Path, found: u32) -> Result<(), StoreError> {
    if found <= SCHEMA_VERSION {
        return Ok(());
    }
    Err(StoreError::NewerSchema { file: file.to_owned(), found, known: SCHEMA_VERSION })
}

fn connect(file: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags).map_err(|source| unusable(file, source))?;
    // Closing must not change the database before it is known to be valid and ours.
    let configured = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    configured.map_err(|source| unusable(file, source))?;
    Ok(connection)
}

/// Checks that the database is valid and ours, and prepares it for writing.
fn prepare(connection: &mut Connection, file: &Path) -> Result<(), StoreError> {
    let fail = |source| unusable(file, source);
    let version = check_database(connection, file)?;
    if !configure(connection).map_err(fail)? {
        return Err(StoreError::NoLog { file: file.to_owned() });
    }
    migrate(connection, version).map_err(fail)
}

/// Returns the schema version of a valid gpupool database; 0 for a new one.
fn check_database(connection: &Connection, file: &Path) -> Result<u32, StoreError> {
    let fail = |source| unusable(file, source);
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0)).map_err(fail);
    let (application, version) = (number("application_id")?.cast_unsigned(), number("user_version")?.cast_unsigned());
    if application != APPLICATION_ID {
        let tables = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get::<_, i64>(0));
        let new = application == 0 && version == 0 && tables.map_err(fail)? == 0;
        return if new { Ok(0) } else { Err(StoreError::NotOurs { file: file.to_owned(), found: application }) };
    }
    check_version(file, version)?;
    let found: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(fail)?;
    match found.as_str() {
        "ok" => Ok(version),
        _ => Err(StoreError::Corrupt { file: file.to_owned(), what: found }),
    }
}

/// Configures durable commits; returns whether the write-ahead log is active.
fn configure(connection: &Connection) -> rusqlite::Result<bool> {
    connection.busy_timeout(LOCK_WAIT)?;
    connection.pragma_update(None, "foreign_keys", false)?;
    let mode: String = connection.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get(0))?;
    // A commit is on disk before it is acknowledged.
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update_and_check(None, "journal_size_limit", LOG_BYTES, |_| Ok(()))?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)?;
    Ok(mode == "wal")
}

fn unusable(file: &Path, source: rusqlite::Error) -> StoreError {
    let file = file.to_owned();
    match source.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            StoreError::Corrupt { file, what: source.to_string() }
        }
        _ => StoreError::Database { file, source: source.into() },
    }
}

/// Increments and returns the generation. On a full disk the ballast makes room for it.
fn begin_generation(connection: &mut Connection, ballast: &BallastFile) -> rusqlite::Result<u64> {
    let mut begin = || {
        transact(connection, |transaction| {
            let sql = "SELECT CAST(value AS INTEGER) FROM rows WHERE kind = 'generation' AND key = ''";
            let last: Option<i64> = transaction.query_row(sql, [], |row| row.get(0)).optional()?;
            let generation = last.unwrap_or_default().max(0) + 1;
            let sql = "INSERT OR REPLACE INTO rows (kind, key, value) VALUES ('generation', '', ?1)";
            execute(transaction, sql, [generation.to_string()])?;
            Ok(generation.cast_unsigned())
        })
    };
    begin().or_else(|error| if ballast.release() { begin() } else { Err(error) })
}

/// Returns the last row about each entity in the tables and the buffer.
pub(super) fn read_rows(
    connection: &Connection,
    buffer: &WriteAheadBuffer,
    warnings: &mut Vec<String>,
) -> rusqlite::Result<Vec<PoolRow>> {
    let mut rows = Vec::new();
    let mut unreadable = 0;
    let mut statement = connection.prepare(
        "SELECT kind, key, value FROM rows WHERE kind <> 'generation'
         UNION ALL SELECT 'lease', CAST(id AS TEXT), value FROM leases",
    )?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let bytes = |column| row.get_ref(column).ok().and_then(|value| value.as_bytes().ok()).unwrap_or_default();
        match parse_row(bytes(0), bytes(1), bytes(2)) {
            Ok(row) => rows.push(row),
            Err(_) if unreadable >= MAX_ROW_WARNINGS => unreadable += 1,
            Err(why) => {
                let (kind, key) = (String::from_utf8_lossy(bytes(0)), String::from_utf8_lossy(bytes(1)));
                warnings.push(format!("{kind} row {key:?} cannot be read and stays in the database: {why}"));
                unreadable += 1;
            }
        }
    }
    if unreadable > MAX_ROW_WARNINGS {
        warnings.push(format!("{} more rows cannot be read", unreadable - MAX_ROW_WARNINGS));
    }
    buffer.overlay(rows).map_err(encode_error)
}

fn parse_row(kind: &[u8], key: &[u8], value: &[u8]) -> Result<PoolRow, String> {
    let row: PoolRow = serde_json::from_slice(value).map_err(|error| error.to_string())?;
    let (own_kind, own_key) = row_key(&row).map_err(|error| error.to_string())?;
    if own_kind.as_bytes() != kind || own_key.as_bytes() != key {
        return Err(format!("it contains {own_kind} {own_key:?}"));
    }
    Ok(row)
}

// Tables, and migrations of older databases.

/// Application id `GPUP` of our databases.
const APPLICATION_ID: u32 = 0x4750_5550;

/// Migrations, oldest first: number `n` converts schema `n` to `n + 1`. Never change a released one.
const MIGRATIONS: &[fn(&Transaction<'_>) -> rusqlite::Result<()>] =
    &[create_tables, add_clock, add_leases, add_buffer, add_read_only_tokens];

/// Current schema version.
const SCHEMA_VERSION: u32 = MIGRATIONS.len() as u32;

/// Migrates a database from schema `from` to the current one, each step all or nothing.
fn migrate(connection: &mut Connection, from: u32) -> rusqlite::Result<()> {
    for (step, version) in MIGRATIONS.iter().zip(1_u32..).skip(from as usize) {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        step(&transaction)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", version)?;
        transaction.commit()?;
    }
    Ok(())
}

fn create_tables(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch(
        "
        -- Rows of the pool: the last one about each entity.
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

        -- API tokens, by the hashes of their secrets.
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

fn add_clock(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch(
        "
        -- An instant on the pool's clock and on the wall clock, and the boot that it belongs to.
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

/// Moves leases to their own table: their numbers only grow, so a new lease changes only the last page.
fn add_leases(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch(
        "
        CREATE TABLE leases (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        INSERT INTO leases (id, value) SELECT CAST(key AS INTEGER), value FROM rows
            WHERE kind = 'lease' AND key = CAST(CAST(key AS INTEGER) AS TEXT);
        DELETE FROM rows WHERE kind = 'lease' AND key = CAST(CAST(key AS INTEGER) AS TEXT);
        ",
    )
}

/// A new schema rather than a new value of `admin`: to an older version the token would have more rights.
fn add_read_only_tokens(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch("ALTER TABLE tokens ADD COLUMN read_only INTEGER NOT NULL DEFAULT 0;")
}

fn add_buffer(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch(
        "
        -- Batches of rows of equal length, each on its own page, so that writing a batch writes one page.
        CREATE TABLE notes (place INTEGER PRIMARY KEY, number INTEGER NOT NULL, batch TEXT NOT NULL);
        -- Number of the last batch that was flushed to the other tables.
        CREATE TABLE heard (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL);
        ",
    )
}

//! Opening: one owner, checks before the first write, then the schema and the generation. And reading all rows.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use gpupool_core::PoolRow;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Transaction, TransactionBehavior};

use crate::error::StoreError;
use crate::lease_store::key_of;
use crate::limits::{COMPLAINTS, LOCK_WAIT, LOG_BYTES};

use super::buffer::WriteAheadBuffer;
use super::commit::transact;
use super::disk::{Ballast, Lock, lengthen_log};
use super::trail::DeviceNames;
use super::{SqliteStore, execute, unwritable};

impl SqliteStore {
    /// Opens the store in a state directory for writing, and makes both where they are missing.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        // Others reach the agent's socket in it; the files themselves are the agent's alone.
        DirBuilder::new().recursive(true).mode(0o711).create(dir).map_err(|source| StoreError::File {
            path: dir.to_owned(),
            doing: "make the directory",
            source,
        })?;
        let lock = Lock::take(dir)?;
        let file = dir.join("pool.db");
        check_header(&file)?;
        let mut connection = connect(&file)?;
        prepare(&mut connection, &file)?;
        let unreadable = |what| StoreError::Corrupt { file: file.clone(), what };
        let buffer =
            WriteAheadBuffer::read(&connection).map_err(|source| unusable(&file, source))?.map_err(unreadable)?;
        let ballast = Ballast::of(dir);
        let generation = begin_generation(&mut connection, &ballast).map_err(|source| unusable(&file, source))?;
        lengthen_log(&file);
        let mut warnings = Vec::new();
        if let Err(error) = ballast.take() {
            warnings.push(format!("no ballast in {} for when the disk is full: {error}", dir.display()));
        }
        let device_names = DeviceNames::new();
        Ok(Self { connection, file, ballast, buffer, device_names, generation, warnings, _lock: lock })
    }
}

/// Makes the file where it is missing, and refuses one whose first bytes tell that it is not for us.
fn check_header(path: &Path) -> Result<(), StoreError> {
    let fail = |doing| move |source| StoreError::File { path: path.to_owned(), doing, source };
    let mut open = OpenOptions::new();
    let mut file = match open.read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return create(path).map_err(fail("make")),
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
        // Not written back from the log yet, perhaps: the database will tell.
        0 => Ok(()),
        APPLICATION_ID => known(path, number(60)),
        found => Err(StoreError::NotOurs { file: path.to_owned(), found }),
    }
}

fn create(path: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.sync_all()?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn known(file: &Path, found: u32) -> Result<(), StoreError> {
    if found <= SCHEMA_VERSION {
        return Ok(());
    }
    Err(StoreError::NewerSchema { file: file.to_owned(), found, known: SCHEMA_VERSION })
}

fn connect(file: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags).map_err(|source| unusable(file, source))?;
    // Until it is known to be ours and sound, closing it again must not change it.
    let untouched = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    untouched.map_err(|source| unusable(file, source))?;
    Ok(connection)
}

/// Checks that the database is ours and sound, then makes it ready to be written.
fn prepare(connection: &mut Connection, file: &Path) -> Result<(), StoreError> {
    let fail = |source| unusable(file, source);
    let version = check(connection, file)?;
    if !settle(connection).map_err(fail)? {
        return Err(StoreError::NoLog { file: file.to_owned() });
    }
    migrate(connection, version).map_err(fail)
}

/// Returns the schema of a database that is sound and ours, or new.
fn check(connection: &Connection, file: &Path) -> Result<u32, StoreError> {
    let fail = |source| unusable(file, source);
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0)).map_err(fail);
    let (application, version) = (number("application_id")?.cast_unsigned(), number("user_version")?.cast_unsigned());
    if application != APPLICATION_ID {
        let tables = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get::<_, i64>(0));
        let new = application == 0 && version == 0 && tables.map_err(fail)? == 0;
        return if new { Ok(0) } else { Err(StoreError::NotOurs { file: file.to_owned(), found: application }) };
    }
    known(file, version)?;
    let found: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(fail)?;
    match found.as_str() {
        "ok" => Ok(version),
        _ => Err(StoreError::Corrupt { file: file.to_owned(), what: found }),
    }
}

/// Settles how commits are made; says whether they can be made in a log.
fn settle(connection: &Connection) -> rusqlite::Result<bool> {
    connection.busy_timeout(LOCK_WAIT)?;
    connection.pragma_update(None, "foreign_keys", false)?;
    let mode: String = connection.pragma_update_and_check(None, "journal_mode", "wal", |row| row.get(0))?;
    // A commit is on disk before it is answered.
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

/// Counts this opening, and returns how many there were. A full disk is no obstacle as long as there is a ballast.
fn begin_generation(connection: &mut Connection, ballast: &Ballast) -> rusqlite::Result<u64> {
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
    begin().or_else(|error| if ballast.give_up() { begin() } else { Err(error) })
}

/// Returns the last row about each thing, whether it is in the tables or in the buffer.
pub(super) fn read_rows(
    connection: &Connection,
    buffer: &WriteAheadBuffer,
    warnings: &mut Vec<String>,
) -> rusqlite::Result<Vec<PoolRow>> {
    let mut rows = Vec::new();
    let mut bad = 0;
    let mut statement = connection.prepare(
        "SELECT kind, key, value FROM rows WHERE kind <> 'generation'
         UNION ALL SELECT 'lease', CAST(id AS TEXT), value FROM leases",
    )?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let bytes = |column| row.get_ref(column).ok().and_then(|value| value.as_bytes().ok()).unwrap_or_default();
        match understand(bytes(0), bytes(1), bytes(2)) {
            Ok(row) => rows.push(row),
            Err(_) if bad >= COMPLAINTS => bad += 1,
            Err(why) => {
                let (kind, key) = (String::from_utf8_lossy(bytes(0)), String::from_utf8_lossy(bytes(1)));
                warnings.push(format!("{kind} row {key:?} cannot be read and is left where it is: {why}"));
                bad += 1;
            }
        }
    }
    if bad > COMPLAINTS {
        warnings.push(format!("{} more rows cannot be read", bad - COMPLAINTS));
    }
    buffer.overlay(rows).map_err(unwritable)
}

fn understand(kind: &[u8], key: &[u8], value: &[u8]) -> Result<PoolRow, String> {
    let row: PoolRow = serde_json::from_slice(value).map_err(|error| error.to_string())?;
    let (is_kind, is_key) = key_of(&row).map_err(|error| error.to_string())?;
    if is_kind.as_bytes() != kind || is_key.as_bytes() != key {
        return Err(format!("it is about {is_kind} {is_key:?}"));
    }
    Ok(row)
}

// The tables, and how an older database becomes one of today.

/// Marks the file as ours: `GPUP`.
const APPLICATION_ID: u32 = 0x4750_5550;

/// One step per schema, oldest first: number `n` turns schema `n` into `n + 1`. Never change one that was released.
const MIGRATIONS: &[fn(&Transaction<'_>) -> rusqlite::Result<()>] = &[rows_and_history, clock, leases, notes];

/// The schema of today.
const SCHEMA_VERSION: u32 = MIGRATIONS.len() as u32;

/// Brings a database of schema `from` to that of today, each step all or nothing.
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

fn rows_and_history(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
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

fn clock(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
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
fn leases(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch(
        "
        CREATE TABLE leases (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        INSERT INTO leases (id, value) SELECT CAST(key AS INTEGER), value FROM rows
            WHERE kind = 'lease' AND key = CAST(CAST(key AS INTEGER) AS TEXT);
        DELETE FROM rows WHERE kind = 'lease' AND key = CAST(CAST(key AS INTEGER) AS TEXT);
        ",
    )
}

fn notes(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    transaction.execute_batch(
        "
        -- Batches of rows, each on a page of its own and all of one length, so that to note one writes one page.
        CREATE TABLE notes (place INTEGER PRIMARY KEY, number INTEGER NOT NULL, batch TEXT NOT NULL);
        -- The number of the last one that the other tables have heard of.
        CREATE TABLE heard (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL);
        ",
    )
}

//! Databases of every released schema are kept as text and must keep opening.
//!
//! With a new schema, save one: `GPUPOOL_SAVE=crates/store/tests/fixtures/vN.sql cargo test -p gpupool-store --test saved
//! -- --ignored` (an absolute path), and add a test that reads it. A saved one is never changed again.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "../../core/tests/support/mod.rs"]
mod support;

use std::fmt::Write;
use std::{env, fs};

use common::{clock, leases, open, wall};
use gpupool_core::{Command, Strategy};
use gpupool_store::{Query, Role};
use rusqlite::Connection;
use support::{Stage, by, owned, part, policies, whole};
use tempfile::tempdir;

#[test]
fn a_saved_database_of_schema_1_opens() {
    let dir = tempdir().unwrap();
    let saved = Connection::open(dir.path().join("pool.db")).unwrap();
    saved.execute_batch(include_str!("fixtures/v1.sql")).unwrap();
    drop(saved);
    let (mut store, rows) = open(dir.path());
    assert_eq!(leases(&rows), [0, 1, 2]);
    let names: Vec<String> = rows.iter().map(|row| format!("{row:?}")).collect();
    for kind in ["Node", "Device", "Lease", "Counters", "Policies", "Usage", "Workload"] {
        assert!(names.iter().any(|name| name.starts_with(kind)), "a row of kind {kind}");
    }
    let history = store.history(&Query::default()).unwrap().records;
    assert_eq!(history.iter().map(|record| record.lease.0).collect::<Vec<_>>(), [0, 1, 0, 2]);
    assert!(history.iter().all(|record| record.devices[0].node == "a"));
    let tokens = store.tokens().unwrap();
    assert_eq!((&*tokens[0].token.owner, tokens[0].token.role), ("alice", Role::Admin));
}

/// A database in which a little of everything is kept, as text.
#[test]
#[ignore = "writes a file, named by GPUPOOL_SAVE"]
fn save_a_database() {
    let dir = tempdir().unwrap();
    let mut stage = Stage::of(2);
    stage.run(Command::SetPolicies { policies: Box::new(policies([])) });
    let first = stage.ask(owned("alice", by(Strategy::Fgd, part(500))));
    stage.ask(owned("bob", whole()));
    stage.ask(owned("bob", whole()));
    stage.now = stage.now.after(support::secs(10));
    stage.release(first);
    let (mut store, _) = open(dir.path());
    store.commit(&stage.rows, clock(stage.now.0)).unwrap();
    store.create_token("alice", Role::Admin, wall(0)).unwrap();
    drop(store);
    let connection = Connection::open(dir.path().join("pool.db")).unwrap();
    fs::write(env::var_os("GPUPOOL_SAVE").unwrap(), text_of(&connection).unwrap()).unwrap();
}

fn text_of(connection: &Connection) -> rusqlite::Result<String> {
    let mut text = String::new();
    for name in ["application_id", "user_version"] {
        let number: i64 = connection.pragma_query_value(None, name, |row| row.get(0))?;
        writeln!(text, "PRAGMA {name} = {number};").unwrap();
    }
    let mut tables = connection.prepare("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL")?;
    let mut tables = tables.query([])?;
    while let Some(table) = tables.next()? {
        let (kind, name, sql): (String, String, String) = (table.get(0)?, table.get(1)?, table.get(2)?);
        writeln!(text, "{sql};").unwrap();
        if kind != "table" {
            continue;
        }
        let columns = "SELECT 'SELECT ' || group_concat('quote(' || name || ')', ' || '','' || ') || ' FROM ' || ?1
            FROM pragma_table_info(?1)";
        let select: String = connection.query_row(columns, [&name], |row| row.get(0))?;
        let mut rows = connection.prepare(&select)?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            writeln!(text, "INSERT INTO {name} VALUES ({});", row.get::<_, String>(0)?).unwrap();
        }
    }
    Ok(text)
}

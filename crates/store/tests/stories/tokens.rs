//! Tokens: shown once, found by their secret, gone when revoked.

use std::fs;

use crate::common::{open, wall};
use gpupool_store::{Role, TokenId, TokenOwner};
use tempfile::tempdir;

#[test]
fn a_token_is_found_by_its_secret_until_it_is_revoked() {
    let dir = tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let (alice, secret) = store.create_token("alice", Role::User, wall(1)).unwrap();
    let (_, other) = store.create_token("root", Role::Admin, wall(2)).unwrap();
    assert_ne!(secret, other);
    drop(store);
    let (mut store, _) = open(dir.path());
    let owner = TokenOwner { id: alice, owner: "alice".into(), role: Role::User };
    assert_eq!(store.find_token(secret.reveal()).unwrap(), Some(owner));
    assert_eq!(store.find_token(other.reveal()).unwrap().unwrap().role, Role::Admin);
    assert_eq!(store.find_token(&secret.reveal()[..67]).unwrap(), None);
    assert!(store.revoke_token(alice, wall(3)).unwrap());
    assert!(!store.revoke_token(alice, wall(4)).unwrap(), "it is revoked already");
    assert!(!store.revoke_token(TokenId(99), wall(4)).unwrap());
    assert_eq!(store.find_token(secret.reveal()).unwrap(), None);
    let times: Vec<_> = store.tokens().unwrap().iter().map(|line| (line.created_at, line.revoked_at)).collect();
    assert_eq!(times, [(wall(1), Some(wall(3))), (wall(2), None)]);
}

#[test]
fn a_secret_is_neither_printed_nor_kept() {
    let dir = tempdir().unwrap();
    let (mut store, _) = open(dir.path());
    let made = store.create_token("alice", Role::User, wall(1)).unwrap();
    let secret = made.1.reveal();
    assert!(secret.len() == 68 && secret.starts_with("gpt_"), "{} characters", secret.len());
    assert!(!format!("{made:?}").contains(&secret[4..]));
    for file in ["pool.db", "pool.db-wal"] {
        let bytes = fs::read(dir.path().join(file)).unwrap();
        assert!(!bytes.windows(20).any(|part| part == &secret.as_bytes()[10..30]), "{file}");
    }
}

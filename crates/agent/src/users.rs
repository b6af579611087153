//! Names of users, from `/etc/passwd`: a directory service could hang.

use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};

use gpupool_core::escape_text;

/// The number of users whose names are cached. For others the list is read each time.
const CACHED_NAMES: usize = 4_096;

/// Returns the name of a user as plain text; `uid:N` if the list has none.
pub(crate) fn name_of(uid: u32) -> Arc<str> {
    static KNOWN: Mutex<Option<HashMap<u32, Arc<str>>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(name) = known.get(&uid) {
        return name.clone();
    }
    let list = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name: Arc<str> =
        name_in(&list, uid).map_or_else(|| format!("uid:{uid}").into(), |name| escape_text(name).into());
    if known.len() < CACHED_NAMES {
        known.insert(uid, name.clone());
    }
    name
}

fn name_in(list: &str, uid: u32) -> Option<&str> {
    let wanted = uid.to_string();
    list.lines().find_map(|line| {
        let mut parts = line.split(':');
        let name = parts.next().filter(|name| !name.is_empty())?;
        (parts.nth(1)? == wanted).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_goes_by_the_name_in_the_list() {
        let list = "root:x:0:0::/:/bin/sh\nbroken\nalice:x:1001:1001::/home:/bin/sh\n";
        assert_eq!(name_in(list, 1001), Some("alice"));
        assert_eq!(name_in(list, 5), None);
        assert_eq!(&*name_of(u32::MAX - 7), "uid:4294967288");
    }
}

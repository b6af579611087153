//! What SIGHUP can change in a running agent, and what waits for a restart.

use crate::load::Loaded;

/// The keys in which two configurations differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Taken at once.
    pub applied: Vec<String>,
    /// Taken at the next start.
    pub need_restart: Vec<String>,
}

impl Loaded {
    /// What would change with `new`. Settings of clients do not concern an agent and are left out.
    pub fn changes(&self, new: &Self) -> Changes {
        let mut changes = Changes::default();
        let mut note = |key: &str, live: bool| {
            let list = if live { &mut changes.applied } else { &mut changes.need_restart };
            list.push(key.to_owned());
        };
        for now in new.resolved.iter().filter(|now| !now.key.starts_with("client.")) {
            let Some(before) = self.resolved.iter().find(|before| before.key == now.key) else {
                note(&now.key, now.live);
                continue;
            };
            if before.value != now.value {
                // A certificate can be exchanged while the agent runs; TLS cannot be switched on or off.
                let both_set = !before.value.is_null() && !now.value.is_null();
                note(&now.key, now.live && both_set);
            }
        }
        for before in &self.resolved {
            if !new.resolved.iter().any(|now| now.key == before.key) {
                note(&before.key, before.live);
            }
        }
        changes
    }
}

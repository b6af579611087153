//! Who asks, and what that lets them do.

use std::sync::Arc;

/// What a caller may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Look at what everybody may see.
    Reader,
    /// Take leases, and do with one's own as one likes.
    User,
    /// Do as one likes with anybody's, and with devices.
    Admin,
}

/// Owners that nobody vouches for have this before their name, so that they can never be taken for one who is known.
pub const ANONYMOUS: &str = "anonymous";

/// Somebody who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// On whose account.
    pub owner: Arc<str>,
    /// What they may do.
    pub role: Role,
    /// The user they run as, where the kernel vouches for it.
    pub uid: Option<u32>,
}

impl Caller {
    /// Somebody of the network who showed nothing.
    pub fn reader() -> Self {
        Self { owner: ANONYMOUS.into(), role: Role::Reader, uid: None }
    }

    /// The agent itself.
    pub fn agent() -> Self {
        Self { owner: "gpupool".into(), role: Role::Admin, uid: None }
    }

    /// Whether they may do as they like with what this owner took. Those nobody vouches for share what they took.
    pub fn may_act_for(&self, owner: &str) -> bool {
        match self.role {
            Role::Admin => true,
            Role::User => *self.owner == *owner || (is_anonymous(&self.owner) && is_anonymous(owner)),
            Role::Reader => false,
        }
    }
}

fn is_anonymous(owner: &str) -> bool {
    owner.strip_prefix(ANONYMOUS).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_act_for_themselves_admins_for_all_and_readers_for_none() {
        let caller = |owner: &str, role| Caller { owner: owner.into(), role, uid: None };
        assert!(caller("alice", Role::User).may_act_for("alice"));
        assert!(!caller("alice", Role::User).may_act_for("bob"));
        assert!(caller("root", Role::Admin).may_act_for("bob"));
        assert!(!caller("alice", Role::Reader).may_act_for("alice"));
        assert!(caller("anonymous:a", Role::User).may_act_for("anonymous:b"));
        assert!(!caller("anonymously", Role::User).may_act_for("anonymous"));
    }
}

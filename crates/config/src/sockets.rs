//! Where agents of this machine listen.

use std::path::{Path, PathBuf};

use crate::Loaded;
use crate::setting::SYSTEM_STATE;

/// Where the Unix socket of a state directory is.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join("agent.sock")
}

impl Loaded {
    /// The Unix sockets of agents of this machine, unless they were told otherwise: this user's, and the machine's. Whoever
    /// named a directory means the agent there, not the machine's.
    pub fn sockets(&self) -> Vec<PathBuf> {
        let named = self.config.server.state_dir.as_path();
        let machines = Path::new(SYSTEM_STATE);
        let also = (named != machines && !self.is_set("server.state_dir")).then_some(machines);
        std::iter::once(named).chain(also).map(socket_path).collect()
    }
}

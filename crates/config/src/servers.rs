//! Which servers a client asks, out of the two settings that can name them.

use crate::load::Loaded;
use crate::problem::Origin;

/// The server that is asked where nobody named one and this machine has no agent's socket.
pub const DEFAULT_ENDPOINT: &str = "http://localhost:8000";

/// The servers a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Servers {
    /// Their URLs, tidied, each once, at least one.
    pub urls: Vec<String>,
    /// Where they were named; [`Origin::Default`] means that the Unix socket of this machine's agent comes first.
    pub origin: Origin,
}

impl Loaded {
    /// The servers a client asks: those named in the strongest place, and there the list before the single one.
    pub fn servers(&self) -> Servers {
        let client = &self.config.client;
        let several = Servers { urls: client.endpoints.clone(), origin: self.origin_of("client.endpoints") };
        let one =
            Servers { urls: client.endpoint.iter().cloned().collect(), origin: self.origin_of("client.endpoint") };
        let named = [several, one].into_iter().filter(|servers| !servers.urls.is_empty());
        // The first of equals wins, hence the list.
        named
            .min_by_key(|servers| weakness(&servers.origin))
            .unwrap_or_else(|| Servers { urls: vec![DEFAULT_ENDPOINT.to_owned()], origin: Origin::Default })
    }
}

/// How far down the order of precedence a place is.
fn weakness(origin: &Origin) -> u8 {
    match origin {
        Origin::Flag { .. } => 0,
        Origin::Environment { .. } => 1,
        Origin::File { .. } => 2,
        Origin::Default => 3,
    }
}

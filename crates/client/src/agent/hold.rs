//! A connection that is the lease: while it is open the lease lives, when it closes the lease is released.

use bytes::BytesMut;
use gpupool_api::lease::Lease;
use http::StatusCode;
use reqwest::Response;

use super::call::Call;
use crate::limits::{EVENT_BYTES, STREAM_SILENCE};
use crate::{AgentClient, ClientError};

/// An open connection that keeps a lease alive. Dropping it, or the end of the process, releases the lease.
#[derive(Debug)]
#[must_use = "dropping it releases the lease"]
pub struct Hold {
    lines: Lines,
    lease: Lease,
}

/// How holding a lease ended.
#[derive(Debug, Clone, PartialEq)]
pub enum HoldEnd {
    /// The lease is over.
    Ended(Box<Lease>),
    /// The connection broke, or the agent went away. Where it is restarted, there is a short time to hold it again.
    Disconnected,
}

impl AgentClient {
    /// Keeps a lease alive by an open connection in place of renewals, over the network too.
    pub async fn hold(&self, lease: u64, token: u64) -> Result<Hold, ClientError> {
        let call = Call::get(format!("/v1/leases/{lease}/hold")).query("token", Some(token));
        let open = self.open(&call).await?;
        let mut lines = Lines { client: self.clone(), status: open.status(), open, buffer: BytesMut::new() };
        match lines.next().await? {
            Some(lease) => Ok(Hold { lines, lease }),
            None => Err(self.unreachable("it closed the connection that was to hold the lease")),
        }
    }
}

impl Hold {
    /// The lease as it was when it was taken hold of.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Waits until the lease or the connection is over. Can be dropped and waited for again.
    pub async fn ended(&mut self) -> HoldEnd {
        loop {
            match self.lines.next().await {
                Ok(Some(lease)) if lease.state.is_ended() => return HoldEnd::Ended(Box::new(lease)),
                Ok(Some(lease)) => self.lease = lease,
                Ok(None) => return HoldEnd::Disconnected,
                Err(error) => {
                    tracing::warn!(%error, lease = self.lease.id, "the connection that holds the lease speaks nonsense");
                    return HoldEnd::Disconnected;
                }
            }
        }
    }
}

/// Leases, one a line; empty lines only say that the connection lives.
#[derive(Debug)]
struct Lines {
    client: AgentClient,
    status: StatusCode,
    open: Response,
    buffer: BytesMut,
}

impl Lines {
    /// The next one; `None` where the connection ended or fell silent.
    async fn next(&mut self) -> Result<Option<Lease>, ClientError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return serde_json::from_slice(&line).map(Some).map_err(|error| {
                    self.client.not_ours(self.status, format!("it tells of a lease that is none ({error})"))
                });
            }
            if self.buffer.len() > EVENT_BYTES {
                return Err(self.client.not_ours(self.status, format!("a line is larger than {EVENT_BYTES} bytes")));
            }
            match tokio::time::timeout(STREAM_SILENCE, self.open.chunk()).await {
                Ok(Ok(Some(chunk))) => self.buffer.extend_from_slice(&chunk),
                _ => return Ok(None),
            }
        }
    }
}

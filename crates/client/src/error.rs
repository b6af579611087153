//! Errors of this crate, by what the caller can do about them.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::time::Duration;

use gpupool_api::lease::LeaseBody;
use gpupool_api::problem::ProblemBody;
use gpupool_config::UnknownBalancing;
use http::StatusCode;

use crate::Endpoint;

/// The next step where no agent runs on this machine. A user's own agent comes last: it cannot lease the GPUs of the service.
const START_AGENT: &str = "if the service of this machine is down, have an administrator start it: systemctl start gpupool; \
                           on a machine without the service, run an agent of your own: gpupool serve";

/// Reason for a failed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address of an agent is malformed: correct it.
    #[error(
        "invalid endpoint {value:?}: {reason}; use http://HOST[:PORT], https://HOST[:PORT], unix:///PATH or the path of a socket"
    )]
    InvalidEndpoint {
        /// Given address.
        value: String,
        /// Description of the mistake.
        reason: String,
    },
    /// Another setting of the client is invalid: change it.
    #[error("{what} is {value}; it must be {allowed}")]
    Setting {
        /// Name of the setting.
        what: &'static str,
        /// Given value; secrets are not shown.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// The environment or the configuration file is invalid: change the named entry.
    #[error("{0}")]
    Configuration(String),
    /// No response, or a broken connection: try again later, or start an agent.
    #[error("{endpoint} does not answer ({}); {}", error_chain(source.as_ref()), unreachable_hint(endpoint, source.as_ref()))]
    Unreachable {
        /// Address of the agent.
        endpoint: Endpoint,
        /// Cause as reported by the transport.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The agent received the request and did not respond in time. The outcome of the request is unknown.
    #[error("{endpoint} did not answer within {} s; the agent may be overloaded: try again, or check its log", after.as_secs_f64())]
    Timeout {
        /// Address of the agent.
        endpoint: Endpoint,
        /// Time waited for the response.
        after: Duration,
    },
    /// The agent refused the request; the problem names the reason.
    #[error("{}", .0.detail)]
    Problem(Box<ProblemBody>),
    /// The server at this address is not an agent: use another address.
    #[error("{endpoint} is not a gpupool agent: {reason}; check the address; {START_AGENT}")]
    NotAnAgent {
        /// Address of the server.
        endpoint: Endpoint,
        /// HTTP status of the response.
        status: u16,
        /// Description of the response.
        reason: String,
    },
    /// The request left the queue without a grant, or the lease ended.
    #[error("lease {} {}{}", .0.id, .0.state.name(), reason_suffix(.0))]
    Ended(Box<LeaseBody>),
    /// The client was already started.
    #[error("Client is already started")]
    AlreadyStarted,
    /// The client was not started, or was stopped: start it.
    #[error("Client must be started before {doing}")]
    NotStarted {
        /// Attempted action.
        doing: &'static str,
    },
    /// No GPU became free within the wait limit: wait longer, or request less.
    #[error("Worker {worker_id} request timed out after {} seconds", after.as_secs_f64())]
    WaitedTooLong {
        /// Worker of the request.
        worker_id: String,
        /// Time waited.
        after: Duration,
    },
    /// The assignment is no longer held: stop using it and request again.
    #[error("the assignment of worker {worker_id} is stale: {lost}")]
    Stale {
        /// Worker that held the assignment.
        worker_id: String,
        /// Reason for the loss.
        #[source]
        lost: LeaseLost,
    },
    /// The circuit breaker of the only endpoint is open: wait, repair the endpoint, or trigger its recovery.
    #[error("the circuit breaker of endpoint {endpoint_id} is open after repeated failures; next attempt in {} s", retry_in.as_secs())]
    BreakerOpen {
        /// Id of the endpoint.
        endpoint_id: String,
        /// Time until the next probe.
        retry_in: Duration,
    },
    /// No endpoint is available: wait, or start one.
    #[error("no endpoint is available: {}", join_causes(causes))]
    AllEndpointsUnavailable {
        /// Each endpoint with its failure.
        causes: Vec<(String, String)>,
    },
    /// The agent runs on another machine, so its GPUs cannot be used here: work there, or use an agent of this machine.
    #[error(
        "{endpoint} is the agent of another machine ({node}), but {starts} on this machine: run this command there, or use the \
         GPUs of this machine: unset --endpoint and GPU_SERVICE_ENDPOINT; {START_AGENT}"
    )]
    AnotherMachine {
        /// Address of the agent.
        endpoint: Endpoint,
        /// Name of the agent's machine.
        node: String,
        /// Subject and verb of the message, as in "`gpupool run` starts its command".
        starts: &'static str,
    },
    /// This machine has no machine id to compare with the agent's: give the path of the agent's socket.
    #[error(
        "cannot tell whether {endpoint} is an agent of this machine, because /etc/machine-id is missing: use its Unix socket, \
         --endpoint unix:/PATH/agent.sock"
    )]
    NoMachineId {
        /// Address of the agent.
        endpoint: Endpoint,
    },
    /// None of the servers is an agent of this machine; one error for each.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    NoLocalAgent(Vec<ClientError>),
    /// The named lease was never granted by this client.
    #[error("{what} was never granted by this client")]
    NeverGranted {
        /// Description of the lease.
        what: String,
    },
}

impl ClientError {
    /// Returns the agent's code of a refusal, such as `no_capacity`.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Problem(problem) => Some(&problem.code),
            _ => None,
        }
    }

    /// Creates the error of an invalid setting.
    pub(crate) fn setting(what: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Setting { what, value: value.to_string(), allowed: allowed.into() }
    }

    /// Creates a refusal by this client in the form of an agent's refusal.
    pub(crate) fn refused(status: u16, code: &str, detail: String) -> Self {
        let title = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
        Self::Problem(Box::new(ProblemBody {
            kind: "about:blank".into(),
            title: title.unwrap_or("Error").into(),
            status,
            code: code.into(),
            detail,
            field: None,
            value: None,
            allowed: None,
        }))
    }

    /// Creates the refusal of a request because of one field.
    pub(crate) fn invalid(field: &str, value: &str, allowed: &str) -> Self {
        let mut refused = Self::refused(422, "invalid", format!("{field} is {value}; it must be {allowed}"));
        if let Self::Problem(problem) = &mut refused {
            problem.field = Some(field.into());
            problem.value = Some(value.into());
            problem.allowed = Some(allowed.into());
        }
        refused
    }

    /// Whether the agent reports that the caller no longer holds the lease.
    pub fn is_lease_lost(&self) -> bool {
        matches!(self.code(), Some("stale" | "ended" | "not_granted" | "unknown_lease"))
    }

    /// Whether the same call may succeed later without a change of settings.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Timeout { .. }
            | Self::BreakerOpen { .. }
            | Self::AllEndpointsUnavailable { .. }
            | Self::WaitedTooLong { .. } => true,
            Self::Problem(problem) => matches!(problem.status, 429 | 500..),
            Self::NotAnAgent { status, .. } => matches!(*status, 429 | 500..),
            _ => false,
        }
    }
}

impl From<UnknownBalancing> for ClientError {
    fn from(error: UnknownBalancing) -> Self {
        Self::Configuration(error.to_string())
    }
}

/// Reason why a lease is no longer held.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseLost {
    /// The agent ended the lease.
    #[error("lease {lease} was lost: {reason}")]
    Ended {
        /// Number of the lease.
        lease: u64,
        /// Name of the cause, if the agent still knows it.
        cause: Option<String>,
        /// Reason in words.
        reason: String,
    },
    /// The lease was granted again with another token.
    #[error("lease {lease} was lost: token {token} is no longer current")]
    Stale {
        /// Number of the lease.
        lease: u64,
        /// Outdated token of this holder.
        token: u64,
    },
    /// The lease could not be renewed for its ttl.
    #[error("lease {lease} counts as lost: no renewal succeeded for {} s ({error})", ttl.as_secs_f64())]
    Unreachable {
        /// Number of the lease.
        lease: u64,
        /// Lifetime of the lease without a renewal.
        ttl: Duration,
        /// Last error of a renewal.
        error: String,
    },
}

fn join_causes(causes: &[(String, String)]) -> String {
    let each: Vec<String> = causes.iter().map(|(id, cause)| format!("{id}: {cause}")).collect();
    each.join("; ")
}

fn reason_suffix(lease: &LeaseBody) -> String {
    lease.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default()
}

/// Hints for errors of the TLS library, each with a part of the error's text.
const TLS_HINTS: [(&str, &str); 4] = [
    (
        "CaUsedAsEndEntity",
        "the server's certificate is that of a CA, as `openssl req -x509` makes by default, and a CA cannot be a server: make it \
         again with -addext basicConstraints=critical,CA:FALSE -addext subjectAltName=DNS:HOST",
    ),
    ("not valid for name", "the server's certificate is for other names: use one of them in the address"),
    ("expired", "the server's certificate has expired: renew it, or set the clock of this machine"),
    ("certificate", "to trust this server, give the file with its CA certificate (GPUPOOL_CA)"),
];

fn unreachable_hint(endpoint: &Endpoint, source: &(dyn StdError + 'static)) -> Cow<'static, str> {
    let cause = error_chain(source);
    let tls_hint = TLS_HINTS.iter().find(|(part, _)| endpoint.is_encrypted() && cause.contains(part));
    if let Some((_, hint)) = tls_hint {
        return (*hint).into();
    }
    if endpoint.is_encrypted() && cause.contains("InvalidContentType") {
        let plain = endpoint.to_string().replacen("https://", "http://", 1);
        return format!("the server there does not use TLS: use {plain}, or set server.tls_cert there").into();
    }
    if endpoint.is_local() {
        START_AGENT.into()
    } else {
        "is the agent running there, and does it listen on the network (setting HOST=0.0.0.0)?".into()
    }
}

/// Joins an error with its sources: the innermost ones describe the cause.
fn error_chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(error) = inner {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        inner = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable(endpoint: &str) -> String {
        let source = Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
        ClientError::Unreachable { endpoint: endpoint.parse().unwrap(), source }.to_string()
    }

    #[test]
    fn an_unreachable_agent_comes_with_the_next_step() {
        let text = unreachable("http://localhost:8000");
        assert!(text.contains("http://localhost:8000") && text.contains("connection refused"), "{text}");
        let steps = ["systemctl start gpupool", "gpupool serve"].map(|step| text.find(step));
        assert!(steps[0].is_some() && steps[0] < steps[1], "the system service comes first: {text}");
        assert!(unreachable("http://gpu7:8000").contains("HOST=0.0.0.0"));
        assert!(unreachable("/run/x.sock").contains("unix:///run/x.sock"));
    }

    #[test]
    fn a_refusal_shows_the_detail_and_code_of_the_agent() {
        let problem = ProblemBody {
            kind: "about:blank".into(),
            title: "Conflict".into(),
            status: 409,
            code: "no_capacity".into(),
            detail: "nothing is free".into(),
            field: None,
            value: None,
            allowed: None,
        };
        let error = ClientError::Problem(Box::new(problem));
        assert_eq!((error.to_string().as_str(), error.code()), ("nothing is free", Some("no_capacity")));
        assert!(!error.is_transient());
    }

    #[test]
    fn a_busy_or_broken_server_of_another_kind_is_transient() {
        for (status, is_transient) in [(429, true), (503, true), (200, false), (404, false)] {
            let endpoint = "http://gpu7:8000".parse().unwrap();
            let error = ClientError::NotAnAgent { endpoint, status, reason: "it sent a page".into() };
            assert_eq!(error.is_transient(), is_transient, "{status}");
        }
    }
}

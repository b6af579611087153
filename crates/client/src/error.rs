//! What can go wrong, by what the caller can do about it.

use std::error::Error as StdError;
use std::time::Duration;

use gpupool_api::lease::LeaseBody;
use gpupool_api::problem::ProblemBody;
use gpupool_config::UnknownBalancing;
use http::StatusCode;

use crate::Endpoint;

/// Why a call did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address of an agent cannot be understood: write it otherwise.
    #[error(
        "endpoint {value:?}: {reason}; allowed are http://HOST[:PORT], https://HOST[:PORT], unix:///PATH or the path of a socket"
    )]
    InvalidEndpoint {
        /// What was given.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Another setting of the client cannot be used: change it.
    #[error("{what} is {value}, and must be {allowed}")]
    Setting {
        /// Which setting.
        what: &'static str,
        /// What it was; a secret is not shown.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// The environment or the configuration file cannot be used: change what is named.
    #[error("{0}")]
    Configuration(String),
    /// Nobody answers, or the connection broke: try again later, or start an agent.
    #[error("{endpoint} does not answer ({}); {}", chain(source.as_ref()), hint(endpoint, source.as_ref()))]
    Unreachable {
        /// Where.
        endpoint: Endpoint,
        /// Why, as the transport says it.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The agent took the question and did not answer in time. Whether it did what was asked is unknown.
    #[error("{endpoint} did not answer within {} s; it may be overloaded: try again, or look at its log", after.as_secs_f64())]
    Timeout {
        /// Where.
        endpoint: Endpoint,
        /// How long was waited.
        after: Duration,
    },
    /// The agent said no, and why.
    #[error("{}", .0.detail)]
    Problem(Box<ProblemBody>),
    /// Something answers there, and it is not an agent: give another address.
    #[error("{endpoint} is not a gpupool agent: {what}; check the address, or start an agent with: gpupool serve")]
    NotOurs {
        /// Where.
        endpoint: Endpoint,
        /// The HTTP status it answered with.
        status: u16,
        /// What it did.
        what: String,
    },
    /// The request left the queue without being granted, or the lease is over.
    #[error("lease {} {}{}", .0.id, .0.state.name(), reason(.0))]
    Ended(Box<LeaseBody>),
    /// The client was started twice.
    #[error("Client is already started")]
    AlreadyStarted,
    /// The client was not started, or was stopped: start it.
    #[error("Client must be started before {doing}")]
    NotStarted {
        /// What was to be done.
        doing: &'static str,
    },
    /// No GPU came free in the time the request had: wait longer, or ask for less.
    #[error("Worker {worker_id} request timed out after {} seconds", after.as_secs_f64())]
    WaitedTooLong {
        /// Who asked.
        worker_id: String,
        /// How long it waited.
        after: Duration,
    },
    /// What was assigned is not held any more: stop using it, and ask anew.
    #[error("the assignment of worker {worker_id} is stale: {lost}")]
    Stale {
        /// Who held it.
        worker_id: String,
        /// Why it is lost.
        #[source]
        lost: LeaseLost,
    },
    /// The endpoint failed too often and is left alone for a while: wait, mend it, or trigger its recovery.
    #[error("endpoint {endpoint_id} failed and is left alone for another {} s", again_in.as_secs())]
    BreakerOpen {
        /// Which.
        endpoint_id: String,
        /// When it will be looked at again.
        again_in: Duration,
    },
    /// No endpoint can be asked now: wait, or start one.
    #[error("none of the {} endpoints can be asked: {}", causes.len(), all_of(causes))]
    AllEndpointsUnavailable {
        /// Each endpoint, and what is wrong with it.
        causes: Vec<(String, String)>,
    },
    /// It is an agent, of a machine whose GPUs cannot be used here: work there, or ask an agent of this machine.
    #[error(
        "{endpoint} is the agent of another machine ({node}), and {starts} on this one, where that machine's GPUs are not: \
         run this command there, or take a GPU of this machine: gpupool serve here, without --endpoint and \
         GPU_SERVICE_ENDPOINT"
    )]
    AnotherMachine {
        /// Where it answers.
        endpoint: Endpoint,
        /// The name of its machine.
        node: String,
        /// Who starts what.
        starts: &'static str,
    },
    /// Nobody can tell whether the agent is of this machine: give the path of its socket.
    #[error(
        "this machine has no id (/etc/machine-id), so nobody can tell whether {endpoint} is an agent of it: use its Unix \
         socket, --endpoint unix:/PATH/agent.sock"
    )]
    NoMachineId {
        /// Where it answers.
        endpoint: Endpoint,
    },
    /// None of the servers is an agent of this machine that can be asked: why, for each.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    NoLocalAgent(Vec<ClientError>),
    /// What is asked about was never granted by this client.
    #[error("{what} was never granted by this client")]
    NeverGranted {
        /// What was given.
        what: String,
    },
}

impl ClientError {
    /// The agent's code for its refusal, such as `no_capacity`.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Problem(problem) => Some(&problem.code),
            _ => None,
        }
    }

    /// A setting that cannot be used.
    pub(crate) fn setting(what: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Setting { what, value: value.to_string(), allowed: allowed.into() }
    }

    /// A refusal of this client, as an agent would put it.
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

    /// The refusal of a request for one of its fields.
    pub(crate) fn invalid(field: &str, value: &str, allowed: &str) -> Self {
        let mut refused = Self::refused(422, "invalid", format!("{field} is {value}, and must be {allowed}"));
        if let Self::Problem(problem) = &mut refused {
            problem.field = Some(field.into());
            problem.value = Some(value.into());
            problem.allowed = Some(allowed.into());
        }
        refused
    }

    /// Whether the agent says that the lease is not the caller's any more.
    pub fn is_lease_lost(&self) -> bool {
        matches!(self.code(), Some("stale" | "ended" | "not_granted" | "unknown_lease"))
    }

    /// Whether the same call may work later without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Timeout { .. }
            | Self::BreakerOpen { .. }
            | Self::AllEndpointsUnavailable { .. }
            | Self::WaitedTooLong { .. } => true,
            Self::Problem(problem) => matches!(problem.status, 429 | 500..),
            Self::NotOurs { status, .. } => matches!(*status, 429 | 500..),
            _ => false,
        }
    }
}

impl From<UnknownBalancing> for ClientError {
    fn from(error: UnknownBalancing) -> Self {
        Self::Configuration(error.to_string())
    }
}

/// Why a lease that was held is not held any more.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseLost {
    /// The agent ended it.
    #[error("lease {lease} was lost: {reason}")]
    Ended {
        /// Which.
        lease: u64,
        /// The name of the cause, where the agent still knows it.
        cause: Option<String>,
        /// Why, in words.
        reason: String,
    },
    /// It was granted anew to somebody: this holder's token is old.
    #[error("lease {lease} was lost: its token {token} is not the current one")]
    Stale {
        /// Which.
        lease: u64,
        /// The old token.
        token: u64,
    },
    /// It could not be renewed for as long as it lives without.
    #[error("lease {lease} must be taken for lost: it could not be renewed for {} s ({error})", ttl.as_secs_f64())]
    Unreachable {
        /// Which.
        lease: u64,
        /// How long it lives without a renewal.
        ttl: Duration,
        /// What went wrong last.
        error: String,
    },
}

fn all_of(causes: &[(String, String)]) -> String {
    let each: Vec<String> = causes.iter().map(|(id, cause)| format!("{id}: {cause}")).collect();
    each.join("; ")
}

fn reason(lease: &LeaseBody) -> String {
    lease.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default()
}

fn hint(endpoint: &Endpoint, source: &(dyn StdError + 'static)) -> &'static str {
    if endpoint.is_encrypted() && chain(source).contains("certificate") {
        "if it is the right one, trust it by giving the file with its CA certificate"
    } else if endpoint.is_local() {
        "is the agent running? start one with: gpupool serve"
    } else {
        "is the agent running there, and does it listen on the network (HOST=0.0.0.0 gpupool serve)?"
    }
}

/// The innermost causes say what happened; the outer ones only that something did.
fn chain(error: &(dyn StdError + 'static)) -> String {
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
    fn an_agent_that_is_not_there_comes_with_what_to_do() {
        let text = unreachable("http://localhost:8000");
        assert!(text.contains("http://localhost:8000") && text.contains("connection refused"), "{text}");
        assert!(text.contains("gpupool serve"), "{text}");
        assert!(unreachable("http://gpu7:8000").contains("HOST=0.0.0.0"));
        assert!(unreachable("/run/x.sock").contains("unix:///run/x.sock"));
    }

    #[test]
    fn a_refusal_is_told_in_the_agents_own_words_and_by_its_code() {
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
    fn a_server_of_another_kind_that_is_busy_or_broken_may_be_asked_again() {
        for (status, is_transient) in [(429, true), (503, true), (200, false), (404, false)] {
            let endpoint = "http://gpu7:8000".parse().unwrap();
            let error = ClientError::NotOurs { endpoint, status, what: "it sent a page".into() };
            assert_eq!(error.is_transient(), is_transient, "{status}");
        }
    }
}

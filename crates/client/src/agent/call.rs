//! One question and its answer: sent, sent again after passing faults, read up to a bound, and judged.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use gpupool_api::problem::{MEDIA_TYPE, ProblemBody};
use http::header::{CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER};
use http::{Method, StatusCode};
use reqwest::Response;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::limits::{ANSWER_BYTES, EXCERPT_CHARS, RETRY_PATIENCE};
use crate::random::Backoff;
use crate::transport::{HttpRequest, HttpResponse, TransportError};
use crate::{AgentClient, ClientError};

/// A question to the agent.
pub(crate) struct Call {
    /// As it is sent; its timeout is known when it is.
    question: HttpRequest,
    /// How long the agent was asked to wait with the answer.
    wait: Duration,
    /// Whether asking twice is the same as asking once.
    is_repeatable: bool,
    /// Whether 503 may come with the answer in place of a problem.
    may_be_degraded: bool,
}

impl Call {
    pub(crate) fn get(route: impl Into<String>) -> Self {
        Self::new(Method::GET, route)
    }

    pub(crate) fn post(route: impl Into<String>, body: &impl Serialize) -> Self {
        // The bodies are texts, numbers and maps with text keys, which always have a form in JSON.
        let body = serde_json::to_vec(body).unwrap_or_default();
        let mut call = Self::new(Method::POST, route);
        call.question.body = Some(body.into());
        call
    }

    pub(crate) fn delete(route: impl Into<String>) -> Self {
        Self::new(Method::DELETE, route)
    }

    fn new(method: Method, route: impl Into<String>) -> Self {
        let (route, query, headers) = (route.into(), Vec::new(), HeaderMap::new());
        let question = HttpRequest { method, route, query, headers, body: None, timeout: Duration::ZERO };
        Self { question, wait: Duration::ZERO, is_repeatable: true, may_be_degraded: false }
    }

    /// Adds to the query, where there is a value.
    pub(crate) fn query(mut self, name: &'static str, value: Option<impl ToString>) -> Self {
        self.question.query.extend(value.map(|value| (name, value.to_string())));
        self
    }

    /// Adds a header, where its value can be sent.
    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        if let Ok(value) = value.parse() {
            self.question.headers.insert(name, value);
        }
        self
    }

    /// The agent was asked to wait so long.
    pub(crate) fn waits(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// Asking twice does it twice: sent again only where it cannot have arrived.
    pub(crate) fn only_once(self) -> Self {
        Self { is_repeatable: false, ..self }
    }

    /// 503 may come with the answer.
    pub(crate) fn may_be_degraded(self) -> Self {
        Self { may_be_degraded: true, ..self }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.question.method, self.question.route)
    }
}

/// How one try went wrong.
enum Failure {
    /// There is no answer.
    NoAnswer(TransportError),
    /// The agent cannot now and says when to come back.
    Later(Duration, ClientError),
    /// Asking again would not help.
    Final(ClientError),
}

impl AgentClient {
    /// Asks, and reads the answer as JSON.
    pub(crate) async fn ask<T: DeserializeOwned>(&self, call: &Call) -> Result<T, ClientError> {
        let (status, body) = self.ask_bytes(call).await?;
        serde_json::from_slice(&body).map_err(|error| {
            let said = format!("{call} was answered with what it never says ({error})");
            self.not_ours(status, format!("{said}: {}", excerpt(&body)))
        })
    }

    /// Asks, and reads the answer as text.
    pub(crate) async fn ask_text(&self, call: &Call) -> Result<String, ClientError> {
        let (_, body) = self.ask_bytes(call).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Asks, and expects nothing but success.
    pub(crate) async fn tell(&self, call: &Call) -> Result<(), ClientError> {
        self.ask_bytes(call).await.map(|_| ())
    }

    /// Asks once for an answer that does not end; only its beginning has to come in time.
    pub(crate) async fn open(&self, call: &Call) -> Result<Response, ClientError> {
        let Some(http) = &self.inner.http else {
            return Err(self.unreachable("what carries questions to it cannot carry streams"));
        };
        let answer = self.inner.answer + call.wait;
        let sent = tokio::time::timeout(answer, http.build(self.question(call)).send()).await;
        let response = sent.map_err(|_| self.timeout(answer))?;
        let response = response.map_err(|error| self.unreachable(error.without_url()))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let (status, headers) = (response.status(), response.headers().clone());
        let body = tokio::time::timeout(answer, response.bytes()).await.map_err(|_| self.timeout(answer))?;
        let body = body.map_err(|error| self.unreachable(error.without_url()))?;
        Err(self.refusal(call, status, &headers, &body))
    }

    async fn ask_bytes(&self, call: &Call) -> Result<(StatusCode, Bytes), ClientError> {
        let started = Instant::now();
        let mut backoff = Backoff::default();
        let mut tries = 0;
        loop {
            let failure = match self.once(call).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            let pause = match &failure {
                Failure::NoAnswer(TransportError::NotSent(_)) => backoff.next(),
                Failure::NoAnswer(TransportError::Broken(_)) if call.is_repeatable => backoff.next(),
                Failure::Later(after, _) => *after + backoff.next(),
                _ => return Err(self.given_up(failure, call)),
            };
            // What the agent was asked to wait does not use up the patience.
            if tries >= self.inner.retries || started.elapsed() + pause > RETRY_PATIENCE + call.wait {
                return Err(self.given_up(failure, call));
            }
            tracing::debug!(endpoint = %self.inner.endpoint, route = call.question.route, ?pause, "trying again");
            tokio::time::sleep(pause).await;
            tries += 1;
        }
    }

    async fn once(&self, call: &Call) -> Result<(StatusCode, Bytes), Failure> {
        let asked = self.inner.transport.exchange(self.question(call)).await;
        let HttpResponse { status, headers, body } = asked.map_err(Failure::NoAnswer)?;
        let is_degraded_answer =
            call.may_be_degraded && status == StatusCode::SERVICE_UNAVAILABLE && !is_problem(&headers);
        if status.is_success() || is_degraded_answer {
            return Ok((status, body));
        }
        let refusal = self.refusal(call, status, &headers, &body);
        match retry_after(status, &headers) {
            Some(after) => Err(Failure::Later(after, refusal)),
            None => Err(Failure::Final(refusal)),
        }
    }

    fn question(&self, call: &Call) -> HttpRequest {
        HttpRequest { timeout: self.inner.answer + call.wait, ..call.question.clone() }
    }

    /// What an answer other than success means.
    fn refusal(&self, call: &Call, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> ClientError {
        if is_problem(headers)
            && let Ok(problem) = serde_json::from_slice::<ProblemBody>(body)
        {
            return ClientError::Problem(Box::new(problem));
        }
        if status.is_redirection() {
            let to = headers.get(LOCATION).and_then(|to| to.to_str().ok()).unwrap_or("somewhere else");
            return self.not_ours(status, format!("it sends to {:?}, which is not followed", excerpt(to.as_bytes())));
        }
        let said = format!("{call} was answered with {status}");
        match status {
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                self.unreachable(said)
            }
            _ => self.not_ours(status, format!("{said}: {}", excerpt(body))),
        }
    }

    fn given_up(&self, failure: Failure, call: &Call) -> ClientError {
        match failure {
            Failure::NoAnswer(TransportError::Late) => self.timeout(self.inner.answer + call.wait),
            Failure::NoAnswer(TransportError::NotSent(error) | TransportError::Broken(error)) => {
                self.unreachable(error)
            }
            Failure::NoAnswer(TransportError::TooLarge(status)) => {
                self.not_ours(status, format!("its answer is larger than {ANSWER_BYTES} bytes"))
            }
            Failure::Later(_, error) | Failure::Final(error) => error,
        }
    }

    pub(crate) fn unreachable(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
        ClientError::Unreachable { endpoint: self.inner.endpoint.clone(), source: source.into() }
    }

    pub(crate) fn timeout(&self, after: Duration) -> ClientError {
        ClientError::Timeout { endpoint: self.inner.endpoint.clone(), after }
    }

    pub(crate) fn not_ours(&self, status: StatusCode, what: String) -> ClientError {
        ClientError::NotOurs { endpoint: self.inner.endpoint.clone(), status: status.as_u16(), what }
    }
}

fn is_problem(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).is_some_and(|kind| kind.starts_with(MEDIA_TYPE))
}

/// When to come back, where the agent says that it cannot now.
fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    if !matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        return None;
    }
    let secs = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse::<u32>().ok()?;
    Some(Duration::from_secs(secs.into()))
}

/// The beginning of an answer, fit to be printed.
fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(EXCERPT_CHARS * 4)]);
    let printable = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    printable.take(EXCERPT_CHARS).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_that_says_when_is_asked_again() {
        let mut headers = HeaderMap::new();
        assert_eq!(retry_after(StatusCode::SERVICE_UNAVAILABLE, &headers), None);
        headers.insert(RETRY_AFTER, "2".parse().unwrap());
        assert_eq!(retry_after(StatusCode::SERVICE_UNAVAILABLE, &headers), Some(Duration::from_secs(2)));
        assert_eq!(retry_after(StatusCode::TOO_MANY_REQUESTS, &headers), Some(Duration::from_secs(2)));
        assert_eq!(retry_after(StatusCode::CONFLICT, &headers), None);
        headers.insert(RETRY_AFTER, "-1".parse().unwrap());
        assert_eq!(retry_after(StatusCode::SERVICE_UNAVAILABLE, &headers), None);
    }

    #[test]
    fn what_is_shown_of_an_answer_is_short_and_printable() {
        assert_eq!(excerpt(b"\x1b[31m<html>\n</html>\xff"), "[31m<html> </html>\u{fffd}");
        assert_eq!(excerpt("ü".repeat(1000).as_bytes()).chars().count(), EXCERPT_CHARS);
    }
}

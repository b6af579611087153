//! One API call: sent, retried after transient failures, read up to a size limit, and converted to a result.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use gpupool_api::problem::{MEDIA_TYPE, ProblemBody};
use gpupool_core::is_plain;
use http::header::{CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER};
use http::{Method, StatusCode};
use reqwest::Response;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::limits::{MAX_EXCERPT_CHARS, MAX_RESPONSE_BYTES, RETRY_TIME_LIMIT};
use crate::random::Backoff;
use crate::transport::{HttpRequest, HttpResponse, TransportError};
use crate::{AgentClient, ClientError};

/// A call of an agent's API.
pub(crate) struct ApiCall {
    /// Request to send; its timeout is set when it is sent.
    request: HttpRequest,
    /// Time that the agent may wait before it responds.
    wait: Duration,
    /// Whether sending the call twice has the same effect as once.
    is_repeatable: bool,
    /// Whether status 503 may carry the regular body in place of a problem.
    may_be_degraded: bool,
}

impl ApiCall {
    pub(crate) fn get(route: impl Into<String>) -> Self {
        Self::new(Method::GET, route)
    }

    pub(crate) fn post(route: impl Into<String>, body: &impl Serialize) -> Self {
        // The bodies consist of texts, numbers and maps with text keys, which can always be serialized.
        let body = serde_json::to_vec(body).unwrap_or_default();
        let mut call = Self::new(Method::POST, route);
        call.request.body = Some(body.into());
        call
    }

    pub(crate) fn delete(route: impl Into<String>) -> Self {
        Self::new(Method::DELETE, route)
    }

    fn new(method: Method, route: impl Into<String>) -> Self {
        let (route, query, headers) = (route.into(), Vec::new(), HeaderMap::new());
        let request = HttpRequest { method, route, query, headers, body: None, timeout: Duration::ZERO };
        Self { request, wait: Duration::ZERO, is_repeatable: true, may_be_degraded: false }
    }

    /// Adds a query parameter if there is a value.
    pub(crate) fn query(mut self, name: &'static str, value: Option<impl ToString>) -> Self {
        self.request.query.extend(value.map(|value| (name, value.to_string())));
        self
    }

    /// Adds a header if its value is valid.
    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        if let Ok(value) = value.parse() {
            self.request.headers.insert(name, value);
        }
        self
    }

    /// Sets the time that the agent may wait.
    pub(crate) fn with_wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// Marks a call whose repetition has another effect: retried only if it cannot have arrived.
    pub(crate) fn not_repeatable(self) -> Self {
        Self { is_repeatable: false, ..self }
    }

    /// Accepts status 503 with the regular body.
    pub(crate) fn may_be_degraded(self) -> Self {
        Self { may_be_degraded: true, ..self }
    }
}

impl fmt::Display for ApiCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.request.method, self.request.route)
    }
}

/// Failure of one attempt.
enum CallFailure {
    /// No response.
    NoResponse(TransportError),
    /// The agent is busy and names the time of the next attempt.
    RetryAfter(Duration, ClientError),
    /// Another attempt would not help.
    Final(ClientError),
}

impl AgentClient {
    /// Sends a call and parses the response as JSON.
    pub(crate) async fn send<T: DeserializeOwned>(&self, call: &ApiCall) -> Result<T, ClientError> {
        let (status, body) = self.send_for_bytes(call).await?;
        serde_json::from_slice(&body).map_err(|error| {
            let summary = format!("unexpected response to {call} ({error})");
            self.not_an_agent(status, format!("{summary}: {}", excerpt(&body)))
        })
    }

    /// Sends a call and returns the response as text.
    pub(crate) async fn send_for_text(&self, call: &ApiCall) -> Result<String, ClientError> {
        let (_, body) = self.send_for_bytes(call).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Sends a call whose response has no content.
    pub(crate) async fn send_for_success(&self, call: &ApiCall) -> Result<(), ClientError> {
        self.send_for_bytes(call).await.map(|_| ())
    }

    /// Opens a stream; the time limit covers only its beginning.
    pub(crate) async fn open_stream(&self, call: &ApiCall) -> Result<Response, ClientError> {
        let Some(http) = &self.inner.http else {
            return Err(self.unreachable("the transport does not support streaming responses"));
        };
        let limit = self.inner.response_timeout + call.wait;
        let sent = tokio::time::timeout(limit, http.build(self.http_request(call)).send()).await;
        let response = sent.map_err(|_| self.timeout(limit))?;
        let response = response.map_err(|error| self.unreachable(error.without_url()))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let (status, headers) = (response.status(), response.headers().clone());
        let body = tokio::time::timeout(limit, response.bytes()).await.map_err(|_| self.timeout(limit))?;
        let body = body.map_err(|error| self.unreachable(error.without_url()))?;
        Err(self.response_error(call, status, &headers, &body))
    }

    async fn send_for_bytes(&self, call: &ApiCall) -> Result<(StatusCode, Bytes), ClientError> {
        let started = Instant::now();
        let mut backoff = Backoff::default();
        let mut attempts = 0;
        loop {
            let failure = match self.send_once(call).await {
                Ok(response) => return Ok(response),
                Err(failure) => failure,
            };
            let pause = match &failure {
                CallFailure::NoResponse(TransportError::NotSent(_)) => backoff.next_pause(),
                CallFailure::NoResponse(TransportError::Broken(_)) if call.is_repeatable => backoff.next_pause(),
                CallFailure::RetryAfter(after, _) => *after + backoff.next_pause(),
                _ => return Err(self.final_error(failure, call)),
            };
            // The wait requested from the agent does not count towards the limit.
            if attempts >= self.inner.retries || started.elapsed() + pause > RETRY_TIME_LIMIT + call.wait {
                return Err(self.final_error(failure, call));
            }
            tracing::debug!(endpoint = %self.inner.endpoint, route = call.request.route, ?pause, "retrying");
            tokio::time::sleep(pause).await;
            attempts += 1;
        }
    }

    async fn send_once(&self, call: &ApiCall) -> Result<(StatusCode, Bytes), CallFailure> {
        let exchanged = self.inner.transport.exchange(self.http_request(call)).await;
        let HttpResponse { status, headers, body } = exchanged.map_err(CallFailure::NoResponse)?;
        let is_degraded = call.may_be_degraded && status == StatusCode::SERVICE_UNAVAILABLE && !is_problem(&headers);
        if status.is_success() || is_degraded {
            return Ok((status, body));
        }
        let error = self.response_error(call, status, &headers, &body);
        match retry_after(status, &headers) {
            Some(after) => Err(CallFailure::RetryAfter(after, error)),
            None => Err(CallFailure::Final(error)),
        }
    }

    fn http_request(&self, call: &ApiCall) -> HttpRequest {
        HttpRequest { timeout: self.inner.response_timeout + call.wait, ..call.request.clone() }
    }

    /// Converts a response other than success to an error.
    fn response_error(&self, call: &ApiCall, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> ClientError {
        if is_problem(headers)
            && let Ok(problem) = serde_json::from_slice::<ProblemBody>(body)
        {
            return ClientError::Problem(Box::new(problem));
        }
        if status.is_redirection() {
            let to = headers.get(LOCATION).and_then(|to| to.to_str().ok()).unwrap_or("somewhere else");
            let reason = format!("it redirects to {:?}, and redirects are not followed", excerpt(to.as_bytes()));
            return self.not_an_agent(status, reason);
        }
        let summary = format!("{call} was answered with {status}");
        match status {
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                self.unreachable(summary)
            }
            _ => self.not_an_agent(status, format!("{summary}: {}", excerpt(body))),
        }
    }

    fn final_error(&self, failure: CallFailure, call: &ApiCall) -> ClientError {
        match failure {
            CallFailure::NoResponse(TransportError::TimedOut) => self.timeout(self.inner.response_timeout + call.wait),
            CallFailure::NoResponse(TransportError::NotSent(error) | TransportError::Broken(error)) => {
                self.unreachable(error)
            }
            CallFailure::NoResponse(TransportError::TooLarge(status)) => {
                self.not_an_agent(status, format!("its response is larger than {MAX_RESPONSE_BYTES} bytes"))
            }
            CallFailure::RetryAfter(_, error) | CallFailure::Final(error) => error,
        }
    }

    pub(crate) fn unreachable(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
        ClientError::Unreachable { endpoint: self.inner.endpoint.clone(), source: source.into() }
    }

    pub(crate) fn timeout(&self, after: Duration) -> ClientError {
        ClientError::Timeout { endpoint: self.inner.endpoint.clone(), after }
    }

    pub(crate) fn not_an_agent(&self, status: StatusCode, reason: String) -> ClientError {
        ClientError::NotAnAgent { endpoint: self.inner.endpoint.clone(), status: status.as_u16(), reason }
    }
}

fn is_problem(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).is_some_and(|kind| kind.starts_with(MEDIA_TYPE))
}

/// Returns the time after which the agent can be called again, if the response names one.
fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    if !matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        return None;
    }
    let secs = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse::<u32>().ok()?;
    Some(Duration::from_secs(secs.into()))
}

/// Returns the beginning of a response as printable text.
fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(MAX_EXCERPT_CHARS * 4)]);
    let printable = text.chars().map(|c| if is_plain(c) { c } else { ' ' });
    printable.take(MAX_EXCERPT_CHARS).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_response_with_a_retry_time_is_retried() {
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
    fn an_excerpt_of_a_response_is_short_and_printable() {
        assert_eq!(excerpt(b"\x1b[31m<html>\n</html>\xff"), "[31m<html> </html>\u{fffd}");
        assert_eq!(excerpt("ü".repeat(1000).as_bytes()).chars().count(), MAX_EXCERPT_CHARS);
    }
}

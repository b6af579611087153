//! How one question gets to a server and its answer back: HTTP over TCP, TLS or a Unix socket, or whatever a caller puts in
//! its place. Nothing is tried again here; a fault says what is known of the question's fate.

use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap};
use http::{Method, StatusCode};
use reqwest::RequestBuilder;

use crate::Endpoint;
use crate::limits::ANSWER_BYTES;

/// One question.
#[derive(Debug, Clone)]
pub struct Question {
    /// What is to be done.
    pub method: Method,
    /// With what, as in `/v1/pool`.
    pub route: String,
    /// What follows the `?`.
    pub query: Vec<(&'static str, String)>,
    /// Beside those that every question has.
    pub headers: HeaderMap,
    /// JSON.
    pub body: Option<Bytes>,
    /// How long the whole answer may take.
    pub timeout: Duration,
}

/// A whole answer, of whatever status.
#[derive(Debug, Clone)]
pub struct Answer {
    /// How it went.
    pub status: StatusCode,
    /// What goes with it.
    pub headers: HeaderMap,
    /// What it says.
    pub body: Bytes,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Fault {
    /// The question cannot have arrived.
    NotSent(Box<dyn StdError + Send + Sync>),
    /// The question may have arrived; the answer did not.
    Broken(Box<dyn StdError + Send + Sync>),
    /// The question may have arrived; the answer took too long.
    Late,
    /// The answer is larger than any an agent gives.
    TooLarge(StatusCode),
}

/// What an exchange comes to, in time.
pub type Exchanged<'a> = Pin<Box<dyn Future<Output = Result<Answer, Fault>> + Send + 'a>>;

/// Carries questions to one server.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Asks once. Dropping the future leaves open whether the question arrived.
    fn exchange(&self, question: Question) -> Exchanged<'_>;
}

/// HTTP, over connections that are kept open and used again.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    pub endpoint: Endpoint,
    pub client: reqwest::Client,
}

impl Http {
    /// The question, not sent yet.
    pub fn build(&self, question: Question) -> RequestBuilder {
        let address = self.endpoint.address(&question.route);
        let request = self.client.request(question.method, address).headers(question.headers);
        let request = if question.query.is_empty() { request } else { request.query(&question.query) };
        match question.body {
            Some(body) => request.header(CONTENT_TYPE, "application/json").body(body),
            None => request,
        }
    }

    async fn ask(&self, question: Question) -> Result<Answer, Fault> {
        let timeout = question.timeout;
        let mut response = self.build(question).timeout(timeout).send().await.map_err(fault)?;
        let (status, headers) = (response.status(), std::mem::take(response.headers_mut()));
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(fault)? {
            if body.len() + chunk.len() > ANSWER_BYTES {
                return Err(Fault::TooLarge(status));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Answer { status, headers, body: body.freeze() })
    }
}

impl Transport for Http {
    fn exchange(&self, question: Question) -> Exchanged<'_> {
        Box::pin(self.ask(question))
    }
}

fn fault(error: reqwest::Error) -> Fault {
    let error = error.without_url();
    match (error.is_connect(), error.is_timeout()) {
        (true, _) => Fault::NotSent(error.into()),
        (false, true) => Fault::Late,
        (false, false) => Fault::Broken(error.into()),
    }
}

//! Error responses as `application/problem+json`, each with a code that never changes.

use std::borrow::Cow;

use axum::body::Body;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use gpupool_api::problem::{self, MEDIA_TYPE};
use gpupool_api::view;
use gpupool_core::{CommandDenied, FieldError};

use crate::authority::Refusal;

/// An error response.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: Cow<'static, str>,
    /// The name, the value and the allowed values of a wrong field.
    field: Option<Box<(String, String, String)>>,
    retry_secs: Option<u32>,
}

impl Problem {
    pub(super) fn new(status: StatusCode, code: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { status, code, detail: detail.into(), field: None, retry_secs: None }
    }

    /// Returns the problem of a wrong field.
    pub(super) fn field(field: impl Into<String>, value: impl ToString, allowed: impl Into<String>) -> Self {
        let (field, value, allowed) = (field.into(), value.to_string(), allowed.into());
        let detail = format!("{field} is {value}; it must be {allowed}");
        let problem = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", detail);
        Self { field: Some(Box::new((field, value, allowed))), ..problem }
    }

    pub(super) fn forbidden(code: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::FORBIDDEN, code, detail)
    }

    pub(super) fn not_found(code: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::NOT_FOUND, code, detail)
    }

    fn retry_after(self, secs: u32) -> Self {
        Self { retry_secs: Some(secs), ..self }
    }
}

impl From<FieldError> for Problem {
    fn from(error: FieldError) -> Self {
        Self::field(error.field, error.value, error.allowed)
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let detail = refusal.to_string();
        let unavailable = |code| Self::new(StatusCode::SERVICE_UNAVAILABLE, code, detail.clone()).retry_after(1);
        match refusal {
            Refusal::Denied(denied) => denied.into(),
            Refusal::Forbidden(_) => Self::forbidden("not_allowed", detail),
            Refusal::TooManyWaiting { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many_waiting", detail).retry_after(5)
            }
            Refusal::NotDurable(_) => unavailable("not_durable"),
            Refusal::DiskFull(_) => unavailable("disk_full"),
            Refusal::Busy => unavailable("busy"),
            Refusal::Stopping => unavailable("stopping"),
        }
    }
}

impl From<CommandDenied> for Problem {
    fn from(denied: CommandDenied) -> Self {
        let (status, code) = view::denial_status_and_code(&denied);
        let problem = Self::new(
            StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            code,
            denied.to_string(),
        );
        match denied {
            CommandDenied::Invalid(error) => error.into(),
            CommandDenied::QueueFull { .. } => problem.retry_after(5),
            _ => problem,
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (field, value, allowed) = match self.field.map(|field| *field) {
            Some((field, value, allowed)) => (Some(field), Some(value), Some(allowed)),
            None => (None, None, None),
        };
        let body = problem::ProblemBody {
            kind: "about:blank".into(),
            title: self.status.canonical_reason().unwrap_or("Error").into(),
            status: self.status.as_u16(),
            code: self.code.into(),
            detail: self.detail.into_owned(),
            field,
            value,
            allowed,
        };
        // Texts and numbers can always be written as JSON.
        let mut response = Response::new(Body::from(serde_json::to_vec(&body).unwrap_or_default()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if let Some(secs) = self.retry_secs {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(secs));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"gpupool\""));
        }
        response
    }
}

pub(super) async fn unknown_route(uri: Uri) -> Problem {
    Problem::not_found("unknown_route", format!("there is no route {}; /docs lists all routes", uri.path()))
}

/// The first version whose clients hold a lease by a POST request.
const HOLDS_BY_POST_SINCE: &str = "0.1.0";

pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    if method == Method::GET && uri.path().ends_with("/hold") {
        let detail = format!(
            "a GET request changes nothing: hold a lease with POST {} and the body {{\"token\": …}}; clients of gpupool \
             {HOLDS_BY_POST_SINCE} and newer do",
            uri.path()
        );
        return Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail);
    }
    let detail = format!("method {method} is not allowed for {}; /docs lists the methods of each route", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
}

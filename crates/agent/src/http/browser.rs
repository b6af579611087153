//! Pages for browsers: what they may load, and how they and their parts are sent.
//!
//! A page may load what this agent serves and nothing else, which its policy makes the browser enforce: it works without
//! any network, and tells nobody that it was looked at.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;

/// A page, and what its parts may do.
pub(super) fn page(html: impl Into<Body>, policy: HeaderValue) -> Response {
    let mut response = Response::new(html.into());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A part of a page.
#[derive(Clone)]
pub(super) struct Part {
    pub media_type: &'static str,
    pub is_compressed: bool,
    pub bytes: Bytes,
}

impl Part {
    /// The part as it is sent. A compressed one is sent so to everybody: every browser takes it.
    pub fn response(self) -> Response {
        let mut response = Response::new(Body::from(self.bytes));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.media_type));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("max-age=3600"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if self.is_compressed {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }
}

/// A text as it may stand in HTML.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

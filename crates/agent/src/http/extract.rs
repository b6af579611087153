//! Extraction of bodies, paths and queries. An error names the wrong field, its value and the allowed values.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use bytes::Bytes;
use gpupool_core::LeaseId;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::SharedState;
use super::problem::Problem;

/// A JSON body. An empty body counts as `{}`.
pub(super) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<SharedState> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &SharedState) -> Result<Self, Problem> {
        let limit = usize::try_from(app.config.limits.body_bytes).unwrap_or(usize::MAX);
        let bytes = Limited::new(request.into_body(), limit).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() {
                let detail = format!("the body is larger than {limit} bytes; see limits.body_bytes");
                return Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail);
            }
            Problem::new(
                StatusCode::BAD_REQUEST,
                "unreadable",
                format!("the body did not arrive in full: {error}; send the request again"),
            )
        })?;
        parse_body(&bytes.to_bytes()).map(Self)
    }
}

fn parse_body<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, Problem> {
    let text: &[u8] = if bytes.trim_ascii().is_empty() { b"{}" } else { bytes };
    // serde would read a list as the fields in their order.
    if text.trim_ascii_start().starts_with(b"[") {
        let detail = "the body is a list; it must be an object";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", detail));
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_data() && path != "." {
            return wrong_field(path, &inner.to_string());
        }
        if inner.is_data() {
            let detail = format!("the body is wrong: {inner}");
            return Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", detail);
        }
        Problem::new(StatusCode::BAD_REQUEST, "malformed", format!("the body is not valid JSON: {inner}"))
    })?;
    let more = |error| {
        Problem::new(StatusCode::BAD_REQUEST, "malformed", format!("the body is more than one JSON value: {error}"))
    };
    reader.end().map_err(more)?;
    Ok(value)
}

/// Converts a message of serde, such as `invalid type: string "x", expected u16 at line 1 column 11`.
fn wrong_field(path: String, message: &str) -> Problem {
    let message = message.rsplit_once(" at line ").map_or(message, |(message, _)| message);
    match message.split_once(", expected ") {
        Some((found, expected)) => {
            let found = found.split_once(": ").map_or(found, |(_, found)| found);
            Problem::field(path, found, expected.to_owned())
        }
        None => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", format!("{path}: {message}")),
    }
}

/// The query parameters of a URL.
pub(super) struct QueryParameters<T>(pub T);

impl<T: DeserializeOwned> FromRequestParts<SharedState> for QueryParameters<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &SharedState) -> Result<Self, Problem> {
        match axum::extract::Query::try_from_uri(&parts.uri) {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(error) => Err(Problem::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "invalid",
                format!("the query is wrong: {}", error.body_text()),
            )),
        }
    }
}

/// The id of a lease in a path.
pub(super) struct LeasePath(pub LeaseId);

impl FromRequestParts<SharedState> for LeasePath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &SharedState) -> Result<Self, Problem> {
        let lease = parse_number(parts, app).await?;
        tracing::Span::current().record("lease", lease);
        Ok(Self(LeaseId(lease)))
    }
}

/// The number of a device or token in a path.
pub(super) struct NumberPath(pub u64);

impl FromRequestParts<SharedState> for NumberPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &SharedState) -> Result<Self, Problem> {
        parse_number(parts, app).await.map(Self)
    }
}

async fn parse_number(parts: &mut Parts, app: &SharedState) -> Result<u64, Problem> {
    let unreadable = |error: PathRejection| Problem::new(StatusCode::BAD_REQUEST, "malformed", error.body_text());
    let Path(text) = Path::<String>::from_request_parts(parts, app).await.map_err(unreadable)?;
    text.parse().map_err(|_| Problem::field("id", format!("{text:?}"), "a whole number"))
}

#[cfg(test)]
mod tests {
    use gpupool_api::RequestBody;

    use super::*;

    fn refusal(text: &'static str) -> String {
        format!("{:?}", parse_body::<RequestBody>(&Bytes::from_static(text.as_bytes())).err())
    }

    #[test]
    fn an_error_names_the_field_also_in_nested_objects() {
        assert!(refusal(r#"{"gpus":"x"}"#).contains("gpus"));
        assert!(refusal(r#"{"select":{"gpu_ids":[1,"x"]}}"#).contains("select.gpu_ids[1]"));
        assert!(refusal(r#"{"fractoin":1}"#).contains("fractoin"));
        assert!(refusal("{").contains("malformed"));
        assert!(refusal("{} {}").contains("malformed"));
        assert!(refusal(" [2]").contains("must be an object"));
        assert!(parse_body::<RequestBody>(&Bytes::new()).is_ok());
    }
}

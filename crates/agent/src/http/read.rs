//! Reading what came with a request: an error says which field is wrong, what it was and what is allowed.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use bytes::Bytes;
use gpupool_core::LeaseId;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::Shared;
use super::problem::Problem;

/// A JSON body. No body at all is read as `{}`.
pub(super) struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Shared> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, Problem> {
        let most = usize::try_from(app.config.limits.body_bytes).unwrap_or(usize::MAX);
        let bytes = Limited::new(request.into_body(), most).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() {
                let detail = format!("the body is larger than {most} bytes");
                return Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail);
            }
            Problem::new(StatusCode::BAD_REQUEST, "unreadable", format!("the body did not arrive: {error}"))
        })?;
        parse(&bytes.to_bytes()).map(Self)
    }
}

fn parse<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, Problem> {
    let text: &[u8] = if bytes.trim_ascii().is_empty() { b"{}" } else { bytes };
    // A list would be taken for the fields in their order.
    if text.trim_ascii_start().starts_with(b"[") {
        let detail = "the body is a list, and must be an object";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", detail));
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_data() && path != "." {
            return wrong_field(path, &inner.to_string());
        }
        let code = if inner.is_data() { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::BAD_REQUEST };
        Problem::new(code, if inner.is_data() { "invalid" } else { "malformed" }, format!("the body: {inner}"))
    })?;
    let more = |error| Problem::new(StatusCode::BAD_REQUEST, "malformed", format!("the body: {error}"));
    reader.end().map_err(more)?;
    Ok(value)
}

/// What serde says of a value it cannot take: `invalid type: string "x", expected u16 at line 1 column 11`.
fn wrong_field(path: String, words: &str) -> Problem {
    let words = words.rsplit_once(" at line ").map_or(words, |(words, _)| words);
    match words.split_once(", expected ") {
        Some((found, expected)) => {
            let found = found.split_once(": ").map_or(found, |(_, found)| found);
            Problem::field(path, found, expected.to_owned())
        }
        None => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", format!("{path}: {words}")),
    }
}

/// The query of an address.
pub(super) struct Query<T>(pub T);

impl<T: DeserializeOwned> FromRequestParts<Shared> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, Problem> {
        match axum::extract::Query::try_from_uri(&parts.uri) {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(error) => Err(Problem::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "invalid",
                format!("the query: {}", error.body_text()),
            )),
        }
    }
}

/// The number of a lease, in a path.
pub(super) struct LeaseInPath(pub LeaseId);

impl FromRequestParts<Shared> for LeaseInPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Problem> {
        let lease = number_in_path(parts, app).await?;
        tracing::Span::current().record("lease", lease);
        Ok(Self(LeaseId(lease)))
    }
}

/// Another number in a path.
pub(super) struct NumberInPath(pub u64);

impl FromRequestParts<Shared> for NumberInPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Problem> {
        number_in_path(parts, app).await.map(Self)
    }
}

async fn number_in_path(parts: &mut Parts, app: &Shared) -> Result<u64, Problem> {
    let unreadable = |error: PathRejection| Problem::new(StatusCode::BAD_REQUEST, "malformed", error.body_text());
    let Path(text) = Path::<String>::from_request_parts(parts, app).await.map_err(unreadable)?;
    text.parse().map_err(|_| Problem::field("id", format!("{text:?}"), "a whole number"))
}

#[cfg(test)]
mod tests {
    use gpupool_api::RequestBody;

    use super::*;

    fn refused(text: &'static str) -> String {
        format!("{:?}", parse::<RequestBody>(&Bytes::from_static(text.as_bytes())).err())
    }

    #[test]
    fn an_error_names_the_field_even_deep_inside() {
        assert!(refused(r#"{"gpus":"x"}"#).contains("gpus"));
        assert!(refused(r#"{"select":{"gpu_ids":[1,"x"]}}"#).contains("select.gpu_ids[1]"));
        assert!(refused(r#"{"fractoin":1}"#).contains("fractoin"));
        assert!(refused("{").contains("malformed"));
        assert!(refused("{} {}").contains("malformed"));
        assert!(refused(" [2]").contains("must be an object"));
        assert!(parse::<RequestBody>(&Bytes::new()).is_ok());
    }
}

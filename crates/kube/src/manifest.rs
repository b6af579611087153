//! From text to documents: YAML with `---` between documents, or JSON objects one after the other.
//!
//! Every reader is bounded (size, documents, depth, what aliases expand to), so no text can do worse than be refused.

use serde_saphyr::options::NonFiniteFloatPolicy;
use serde_saphyr::{alias_limits, budget, options};

use crate::error::{KubeError, shown};
use crate::limits::{ALIASED_EVENTS, DEPTH, DOCUMENTS, MANIFEST_BYTES};
use crate::node::Node;

/// Every document of `text` that is not empty, in order. What follows a broken document may be missing: there is no
/// telling where it would begin.
pub(crate) fn read(text: &str) -> Vec<Result<Node, KubeError>> {
    if text.len() > MANIFEST_BYTES {
        return vec![Err(KubeError::TooLarge { what: "bytes", limit: MANIFEST_BYTES })];
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents = json(text).unwrap_or_else(|| yaml(text));
    if documents.len() > DOCUMENTS {
        documents.truncate(DOCUMENTS);
        documents.push(Err(KubeError::TooLarge { what: "documents", limit: DOCUMENTS }));
    }
    documents
}

/// The documents, if the text is JSON. YAML is nearly a superset of JSON, but not of its escapes and tabs.
fn json(text: &str) -> Option<Vec<Result<Node, KubeError>>> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let mut documents = Vec::new();
    for document in serde_json::Deserializer::from_str(text).into_iter::<Node>().take(DOCUMENTS + 1) {
        match document {
            Ok(node) => documents.push(Ok(node)),
            // Flow style YAML begins with a brace too.
            Err(error) if error.is_syntax() => return None,
            Err(error) => {
                documents.push(Err(malformed(Some((error.line() as u64, error.column() as u64)), &error.to_string())));
                break;
            }
        }
    }
    Some(documents)
}

fn yaml(text: &str) -> Vec<Result<Node, KubeError>> {
    let options = options! {
        budget: budget! { max_depth: DEPTH, max_reader_input_bytes: Some(MANIFEST_BYTES) },
        alias_limits: alias_limits! { max_total_replayed_events: ALIASED_EVENTS },
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
    };
    let mut bytes = text.as_bytes();
    serde_saphyr::read_with_options::<_, Node>(&mut bytes, options)
        .take(DOCUMENTS + 1)
        .map(|document| document.map_err(|error| refused(&error)))
        .collect()
}

fn refused(error: &serde_saphyr::Error) -> KubeError {
    // An alias breaks where it is used, which is the place to look at.
    let place = error.location().map(|location| (location.line(), location.column()));
    let message = error.to_string();
    // By the words, because the variant may be wrapped in another that only adds a place.
    if message.starts_with("alias replay") {
        return malformed(place, "the aliases expand to too much; write it out instead");
    }
    match message.strip_prefix("budget breached: ") {
        Some(breach) => malformed(place, &format!("more than is read of one document: {breach}")),
        None => malformed(place, &message),
    }
}

/// One line about a broken document. What the parsers say of the place is cut off, ours is uniform; so is their advice
/// on how to configure them.
fn malformed(place: Option<(u64, u64)>, message: &str) -> KubeError {
    let line = message.lines().next().unwrap_or_default();
    let cut = [" at line ", ", set DuplicateKeyPolicy"].iter().filter_map(|part| line.find(part)).min();
    KubeError::Malformed { place, reason: shown(line[..cut.unwrap_or(line.len())].trim()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(text: &str) -> Vec<String> {
        read(text).into_iter().filter_map(Result::err).map(|error| error.to_string()).collect()
    }

    #[test]
    fn malformed_text_is_an_error_with_its_line_and_column() {
        for (text, place) in [
            ("a: 1\nb: [1, 2\nc: 3\n", "line 3, column 2"),
            ("kind: Pod\n  x: y\n", "line 2, column 4"),
            ("kind: Pod\nkind: Pod\n", "line 2, column 1"),
            ("{\"kind\": \"Pod\",\n \"kind\": \"Pod\"}", "line 2, column 7"),
            ("{\"kind\":", "line 1, column 8"),
        ] {
            let errors = errors(text);
            assert!(errors.len() == 1 && errors[0].ends_with(&format!("({place})")), "{text:?}: {errors:?}");
        }
    }

    #[test]
    fn documents_before_and_after_a_refused_one_are_still_read() {
        let documents = read("a: 1\n---\na: 1\na: 2\n---\n---\na: 3\n");
        assert_eq!(documents.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
    }

    #[test]
    fn json_is_read_with_its_own_escapes_and_tabs_and_flow_yaml_as_yaml() {
        let text = |key: &str| Node::Text(key.to_owned());
        let Ok(Node::Map(json)) = &read("{\n\t\"name\": \"\\ud83d\\ude00\"\n}\n{\"b\": 1}")[0] else { panic!() };
        assert_eq!(json["name"], text("\u{1f600}"));
        let Ok(Node::Map(flow)) = &read("{name: x}")[0] else { panic!() };
        assert_eq!(flow["name"], text("x"));
    }

    #[test]
    fn a_billion_laughs_are_refused_before_they_take_memory() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let before = format!("*a{}", level - 1);
            bomb += &format!("a{level}: &a{level} [{}]\n", [before.as_str(); 10].join(", "));
        }
        assert!(errors(&bomb)[0].contains("aliases expand to too much"), "{:?}", errors(&bomb));
    }

    #[test]
    fn depth_is_bounded_with_and_without_aliases() {
        let nest = |inner: &str| format!("{}{inner}{}", "[".repeat(90), "]".repeat(90));
        let aliases = format!("a: &a {}\nb: &b {}\nc: {}\n", nest("x"), nest("*a"), nest("*b"));
        let object = "{\"a\":".repeat(50_000);
        for text in [aliases, "[".repeat(500_000), "- ".repeat(500_000), object] {
            assert_eq!(errors(&text).len(), 1, "{}", &text[..20]);
        }
    }

    #[test]
    fn too_many_bytes_and_too_many_documents_are_refused() {
        assert!(errors(&" ".repeat(MANIFEST_BYTES + 1))[0].contains("more than 1048576 bytes"));
        assert!(errors(&" ".repeat(MANIFEST_BYTES)).is_empty());
        let many = read(&"---\na: 1\n".repeat(2_000));
        assert_eq!(many.len(), DOCUMENTS + 1);
        assert!(errors(&"---\na: 1\n".repeat(2_000))[0].contains("more than 1024 documents"));
    }
}

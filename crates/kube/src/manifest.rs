//! Parses text into documents: YAML with `---` between documents, or consecutive JSON objects. Size, documents, depth
//! and aliases are limited, so that hostile text is refused.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::NonFiniteFloatPolicy;
use serde_saphyr::{alias_limits, budget, options};

use crate::error::{KubeError, shortened};
use crate::limits::{MAX_ALIASED_EVENTS, MAX_DEPTH, MAX_DOCUMENTS, MAX_MANIFEST_BYTES};

/// Parses every non-empty document in order. Documents after a broken one may be missing, because its end is unknown.
pub(crate) fn parse_documents(text: &str) -> Vec<Result<ManifestNode, KubeError>> {
    if text.len() > MAX_MANIFEST_BYTES {
        return vec![Err(KubeError::TooLarge { what: "bytes", limit: MAX_MANIFEST_BYTES })];
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents = parse_json(text).unwrap_or_else(|| parse_yaml(text));
    if documents.len() > MAX_DOCUMENTS {
        documents.truncate(MAX_DOCUMENTS);
        documents.push(Err(KubeError::TooLarge { what: "documents", limit: MAX_DOCUMENTS }));
    }
    documents
}

/// Parses the documents if the text is JSON. YAML is nearly a superset of JSON, except for escapes and tabs.
fn parse_json(text: &str) -> Option<Vec<Result<ManifestNode, KubeError>>> {
    if !text.trim_start().starts_with('{') {
        return None;
    }
    let mut documents = Vec::new();
    for document in serde_json::Deserializer::from_str(text).into_iter::<ManifestNode>().take(MAX_DOCUMENTS + 1) {
        match document {
            Ok(node) => documents.push(Ok(node)),
            // Flow-style YAML starts with a brace as well.
            Err(error) if error.is_syntax() => return None,
            Err(error) => {
                documents.push(Err(malformed_document(
                    Some((error.line() as u64, error.column() as u64)),
                    &error.to_string(),
                )));
                break;
            }
        }
    }
    Some(documents)
}

fn parse_yaml(text: &str) -> Vec<Result<ManifestNode, KubeError>> {
    let options = options! {
        budget: budget! { max_depth: MAX_DEPTH, max_reader_input_bytes: Some(MAX_MANIFEST_BYTES) },
        alias_limits: alias_limits! { max_total_replayed_events: MAX_ALIASED_EVENTS },
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
    };
    let mut bytes = text.as_bytes();
    serde_saphyr::read_with_options::<_, ManifestNode>(&mut bytes, options)
        .take(MAX_DOCUMENTS + 1)
        .map(|document| document.map_err(|error| yaml_error(&error)))
        .collect()
}

fn yaml_error(error: &serde_saphyr::Error) -> KubeError {
    // An alias fails at the place of its use.
    let place = error.location().map(|location| (location.line(), location.column()));
    let message = error.to_string();
    // The message is compared because the variant may be wrapped in one that only adds a location.
    if message.starts_with("alias replay") {
        return malformed_document(place, "the aliases expand to too many values; write the values out instead");
    }
    match message.strip_prefix("budget breached: ") {
        Some(breach) => malformed_document(place, &format!("the document exceeds a limit: {breach}")),
        None => malformed_document(place, &message),
    }
}

/// Creates the error of a broken document, in one line. The parsers' own location and advice are cut off.
fn malformed_document(place: Option<(u64, u64)>, message: &str) -> KubeError {
    let line = message.lines().next().unwrap_or_default();
    let cut = [" at line ", ", set DuplicateKeyPolicy"].iter().filter_map(|part| line.find(part)).min();
    KubeError::Malformed { place, reason: shortened(line[..cut.unwrap_or(line.len())].trim()) }
}

// Documents as trees, and cursors that know their path for error messages.

/// Value of YAML or JSON. Numbers stay text because quantities and integers are parsed from text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ManifestNode {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Self>),
    Map(BTreeMap<String, Self>),
}

/// Node with its path.
#[derive(Clone)]
pub(crate) struct NodeCursor<'a> {
    node: &'a ManifestNode,
    path: String,
}

impl<'a> NodeCursor<'a> {
    /// Starts at the top of a document.
    pub(crate) fn top(node: &'a ManifestNode) -> Self {
        Self { node, path: String::new() }
    }

    pub(crate) fn path(&self) -> &str {
        if self.path.is_empty() { "the document" } else { &self.path }
    }

    /// Returns the field `key` of a map; `None` if it is absent or null, which Kubernetes treats alike.
    pub(crate) fn get(&self, key: &str) -> Result<Option<Self>, KubeError> {
        let ManifestNode::Map(map) = self.node else { return Err(self.refuse("a map")) };
        let there = map.get(key).filter(|node| **node != ManifestNode::Null);
        Ok(there.map(|node| Self { node, path: self.join(key) }))
    }

    /// Returns the field `key` of a map, or an error if it is absent.
    pub(crate) fn required(&self, key: &str, allowed: &'static str) -> Result<Self, KubeError> {
        let missing = || KubeError::Field { path: self.join(key), value: "nothing".to_owned(), allowed };
        self.get(key)?.ok_or_else(missing)
    }

    /// Returns the field `key` as a list; empty if absent.
    pub(crate) fn list(&self, key: &str) -> Result<Vec<Self>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(Vec::new()) };
        let ManifestNode::List(items) = at.node else { return Err(at.refuse("a list")) };
        let item = |(index, node)| Self { node, path: format!("{}[{index}]", at.path) };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// Returns the entries of the map `key`; none if absent.
    pub(crate) fn entries(&self, key: &str) -> Result<Vec<(&'a str, Self)>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(Vec::new()) };
        let ManifestNode::Map(map) = at.node else { return Err(at.refuse("a map")) };
        Ok(map.iter().map(|(key, node)| (key.as_str(), Self { node, path: at.join(key) })).collect())
    }

    /// Returns the field `key` as text.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(None) };
        match at.node {
            ManifestNode::Text(text) => Ok(Some(text)),
            _ => Err(at.refuse("a string")),
        }
    }

    /// Returns the field `key` as a 32-bit integer of at least `least`.
    pub(crate) fn integer(&self, key: &str, least: i32, allowed: &'static str) -> Result<Option<i32>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(None) };
        let number = match at.node {
            ManifestNode::Number(text) => text.parse().ok().filter(|number| *number >= least),
            _ => None,
        };
        number.map(Some).ok_or_else(|| at.refuse(allowed))
    }

    /// Returns the text of a quantity: a string or a bare number; `0` for null.
    pub(crate) fn quantity(&self) -> Result<&'a str, KubeError> {
        match self.node {
            ManifestNode::Text(text) | ManifestNode::Number(text) => Ok(text),
            ManifestNode::Null => Ok("0"),
            _ => Err(self.refuse("a quantity such as 2, 0.5, 500m, 16Gi or 1e9")),
        }
    }

    /// Returns the string, or the text of a bare number or boolean as the inner error. Null is empty, as in Kubernetes.
    pub(crate) fn string(&self) -> Result<Result<&'a str, String>, KubeError> {
        match self.node {
            ManifestNode::Text(text) => Ok(Ok(text)),
            ManifestNode::Null => Ok(Ok("")),
            ManifestNode::Number(text) => Ok(Err(text.clone())),
            ManifestNode::Bool(value) => Ok(Err(value.to_string())),
            ManifestNode::List(_) | ManifestNode::Map(_) => Err(self.refuse("a string")),
        }
    }

    fn refuse(&self, allowed: &'static str) -> KubeError {
        let value = match self.node {
            ManifestNode::Null => "nothing".to_owned(),
            ManifestNode::Bool(value) => value.to_string(),
            ManifestNode::Number(text) => shortened(text),
            ManifestNode::Text(text) => format!("{:?}", shortened(text)),
            ManifestNode::List(_) => "a list".to_owned(),
            ManifestNode::Map(_) => "a map".to_owned(),
        };
        KubeError::Field { path: self.path().to_owned(), value, allowed }
    }

    fn join(&self, key: &str) -> String {
        let key = shortened(key);
        if self.path.is_empty() { key } else { format!("{}.{key}", self.path) }
    }
}

impl<'de> Deserialize<'de> for ManifestNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        NodeBuilder { depth: 0 }.deserialize(deserializer)
    }
}

/// Builds a node and counts its depth, because aliases can nest deeper than the limits of the parsers.
#[derive(Clone, Copy)]
struct NodeBuilder {
    depth: usize,
}

impl NodeBuilder {
    fn descend<E: Error>(self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(E::custom(format_args!("nested deeper than {MAX_DEPTH} levels")));
        }
        Ok(Self { depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for NodeBuilder {
    type Value = ManifestNode;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<ManifestNode, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NodeBuilder {
    type Value = ManifestNode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Null)
    }

    fn visit_none<E>(self) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Number(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Number(value.to_string()))
    }

    /// Formats the number without an exponent, with the shortest digits that parse back to the same value.
    fn visit_f64<E>(self, value: f64) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Number(value.to_string()))
    }

    fn visit_str<E>(self, text: &str) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<ManifestNode, E> {
        Ok(ManifestNode::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<ManifestNode, A::Error> {
        let builder = self.descend()?;
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(builder)? {
            items.push(item);
        }
        Ok(ManifestNode::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<ManifestNode, A::Error> {
        let builder = self.descend()?;
        let mut map = BTreeMap::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("{:?} is given twice", shortened(&key))));
            }
            map.insert(key, access.next_value_seed(builder)?);
        }
        Ok(ManifestNode::Map(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(text: &str) -> Vec<String> {
        parse_documents(text).into_iter().filter_map(Result::err).map(|error| error.to_string()).collect()
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
    fn documents_before_and_after_a_broken_one_are_parsed() {
        let documents = parse_documents("a: 1\n---\na: 1\na: 2\n---\n---\na: 3\n");
        assert_eq!(documents.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
    }

    #[test]
    fn json_has_its_own_escapes_and_flow_yaml_is_yaml() {
        let text = |key: &str| ManifestNode::Text(key.to_owned());
        let Ok(ManifestNode::Map(json)) = &parse_documents("{\n\t\"name\": \"\\ud83d\\ude00\"\n}\n{\"b\": 1}")[0]
        else {
            panic!()
        };
        assert_eq!(json["name"], text("\u{1f600}"));
        let Ok(ManifestNode::Map(flow)) = &parse_documents("{name: x}")[0] else { panic!() };
        assert_eq!(flow["name"], text("x"));
    }

    #[test]
    fn a_billion_laughs_are_refused_before_they_use_memory() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let before = format!("*a{}", level - 1);
            bomb += &format!("a{level}: &a{level} [{}]\n", [before.as_str(); 10].join(", "));
        }
        assert!(errors(&bomb)[0].contains("aliases expand to too many values"), "{:?}", errors(&bomb));
    }

    #[test]
    fn depth_is_limited_with_and_without_aliases() {
        let nest = |inner: &str| format!("{}{inner}{}", "[".repeat(90), "]".repeat(90));
        let aliases = format!("a: &a {}\nb: &b {}\nc: {}\n", nest("x"), nest("*a"), nest("*b"));
        let object = "{\"a\":".repeat(50_000);
        for text in [aliases, "[".repeat(500_000), "- ".repeat(500_000), object] {
            assert_eq!(errors(&text).len(), 1, "{}", &text[..20]);
        }
    }

    #[test]
    fn too_many_bytes_and_too_many_documents_are_refused() {
        assert!(errors(&" ".repeat(MAX_MANIFEST_BYTES + 1))[0].contains("more than 1048576 bytes"));
        assert!(errors(&" ".repeat(MAX_MANIFEST_BYTES)).is_empty());
        let many = parse_documents(&"---\na: 1\n".repeat(2_000));
        assert_eq!(many.len(), MAX_DOCUMENTS + 1);
        assert!(errors(&"---\na: 1\n".repeat(2_000))[0].contains("more than 1024 documents"));
    }
}

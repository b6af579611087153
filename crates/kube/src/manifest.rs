//! From text to documents: YAML with `---` between documents, or JSON objects one after the other.
//!
//! Every reader is bounded (size, documents, depth, what aliases expand to), so no text can do worse than be refused.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::NonFiniteFloatPolicy;
use serde_saphyr::{alias_limits, budget, options};

use crate::error::{KubeError, shown};
use crate::limits::{ALIASED_EVENTS, DEPTH, DOCUMENTS, MAX_MANIFEST_BYTES};

/// Every document of `text` that is not empty, in order. What follows a broken document may be missing: there is no
/// telling where it would begin.
pub(crate) fn read(text: &str) -> Vec<Result<Node, KubeError>> {
    if text.len() > MAX_MANIFEST_BYTES {
        return vec![Err(KubeError::TooLarge { what: "bytes", limit: MAX_MANIFEST_BYTES })];
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
        budget: budget! { max_depth: DEPTH, max_reader_input_bytes: Some(MAX_MANIFEST_BYTES) },
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

// A document as a tree, and the way down it: every step knows its path, so that an error can name it.

/// A value of YAML or JSON. Numbers stay text: only quantities and a few integers are read, both from text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Self>),
    Map(BTreeMap<String, Self>),
}

/// A node and the path to it.
#[derive(Clone)]
pub(crate) struct At<'a> {
    node: &'a Node,
    path: String,
}

impl<'a> At<'a> {
    /// The top of a document.
    pub(crate) fn top(node: &'a Node) -> Self {
        Self { node, path: String::new() }
    }

    pub(crate) fn path(&self) -> &str {
        if self.path.is_empty() { "the document" } else { &self.path }
    }

    /// The field `key` of this map; `None` where it is absent or null, which Kubernetes treats alike.
    pub(crate) fn get(&self, key: &str) -> Result<Option<Self>, KubeError> {
        let Node::Map(map) = self.node else { return Err(self.refuse("a map")) };
        let there = map.get(key).filter(|node| **node != Node::Null);
        Ok(there.map(|node| Self { node, path: self.join(key) }))
    }

    /// The field `key` of this map, which must be there.
    pub(crate) fn need(&self, key: &str, allowed: &'static str) -> Result<Self, KubeError> {
        let missing = || KubeError::Field { path: self.join(key), value: "nothing".to_owned(), allowed };
        self.get(key)?.ok_or_else(missing)
    }

    /// The field `key` of this map as a list; empty where it is absent.
    pub(crate) fn list(&self, key: &str) -> Result<Vec<Self>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(Vec::new()) };
        let Node::List(items) = at.node else { return Err(at.refuse("a list")) };
        let item = |(index, node)| Self { node, path: format!("{}[{index}]", at.path) };
        Ok(items.iter().enumerate().map(item).collect())
    }

    /// The entries of the map `key` of this map; none where it is absent.
    pub(crate) fn entries(&self, key: &str) -> Result<Vec<(&'a str, Self)>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(Vec::new()) };
        let Node::Map(map) = at.node else { return Err(at.refuse("a map")) };
        Ok(map.iter().map(|(key, node)| (key.as_str(), Self { node, path: at.join(key) })).collect())
    }

    /// The field `key` of this map as text.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(None) };
        match at.node {
            Node::Text(text) => Ok(Some(text)),
            _ => Err(at.refuse("a string")),
        }
    }

    /// The field `key` of this map as a whole number of at least `least` that fits 32 bits, as Kubernetes keeps them.
    pub(crate) fn integer(&self, key: &str, least: i32, allowed: &'static str) -> Result<Option<i32>, KubeError> {
        let Some(at) = self.get(key)? else { return Ok(None) };
        let number = match at.node {
            Node::Number(text) => text.parse().ok().filter(|number| *number >= least),
            _ => None,
        };
        number.map(Some).ok_or_else(|| at.refuse(allowed))
    }

    /// The scalar as a quantity is written: a string, a bare number, or nothing, which is 0.
    pub(crate) fn quantity(&self) -> Result<&'a str, KubeError> {
        match self.node {
            Node::Text(text) | Node::Number(text) => Ok(text),
            Node::Null => Ok("0"),
            _ => Err(self.refuse("a quantity such as 2, 0.5, 500m, 16Gi or 1e9")),
        }
    }

    /// The string this is, or what it was written as where it is a bare number or boolean. Null is empty, as in
    /// Kubernetes.
    pub(crate) fn string(&self) -> Result<Result<&'a str, String>, KubeError> {
        match self.node {
            Node::Text(text) => Ok(Ok(text)),
            Node::Null => Ok(Ok("")),
            Node::Number(text) => Ok(Err(text.clone())),
            Node::Bool(value) => Ok(Err(value.to_string())),
            Node::List(_) | Node::Map(_) => Err(self.refuse("a string")),
        }
    }

    fn refuse(&self, allowed: &'static str) -> KubeError {
        let value = match self.node {
            Node::Null => "nothing".to_owned(),
            Node::Bool(value) => value.to_string(),
            Node::Number(text) => shown(text),
            Node::Text(text) => format!("{:?}", shown(text)),
            Node::List(_) => "a list".to_owned(),
            Node::Map(_) => "a map".to_owned(),
        };
        KubeError::Field { path: self.path().to_owned(), value, allowed }
    }

    fn join(&self, key: &str) -> String {
        let key = shown(key);
        if self.path.is_empty() { key } else { format!("{}.{key}", self.path) }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Reader { depth: 0 }.deserialize(deserializer)
    }
}

/// Builds a node and counts how deep it is in, because aliases can nest deeper than any parser's own limit.
#[derive(Clone, Copy)]
struct Reader {
    depth: usize,
}

impl Reader {
    fn deeper<E: Error>(self) -> Result<Self, E> {
        if self.depth == DEPTH {
            return Err(E::custom(format_args!("nested deeper than {DEPTH} levels")));
        }
        Ok(Self { depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for Reader {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Number(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Number(value.to_string()))
    }

    /// Rust prints the shortest digits that read back the same, without an exponent; Kubernetes' own parser sees
    /// the same digits.
    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Number(value.to_string()))
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Node, E> {
        Ok(Node::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let reader = self.deeper()?;
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(reader)? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let reader = self.deeper()?;
        let mut map = BTreeMap::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("{:?} is given twice", shown(&key))));
            }
            map.insert(key, access.next_value_seed(reader)?);
        }
        Ok(Node::Map(map))
    }
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
        assert!(errors(&" ".repeat(MAX_MANIFEST_BYTES + 1))[0].contains("more than 1048576 bytes"));
        assert!(errors(&" ".repeat(MAX_MANIFEST_BYTES)).is_empty());
        let many = read(&"---\na: 1\n".repeat(2_000));
        assert_eq!(many.len(), DOCUMENTS + 1);
        assert!(errors(&"---\na: 1\n".repeat(2_000))[0].contains("more than 1024 documents"));
    }
}

//! A document as a tree, and the way down it: every step knows its path, so that an error can name it.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::error::{KubeError, shown};
use crate::limits::DEPTH;

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

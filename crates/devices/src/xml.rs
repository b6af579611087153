//! XML as a small tree, read as far as it goes: a document that is cut off keeps what came before the cut.

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use crate::limits;

/// One element.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Element {
    /// Its tag.
    pub name: String,
    /// Its attributes, in order.
    pub attributes: Vec<(String, String)>,
    /// The text directly in it, trimmed.
    pub text: String,
    /// The elements directly in it, in order.
    pub children: Vec<Element>,
}

impl Element {
    /// The first child with this tag.
    pub fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// All children with this tag.
    pub fn children<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Self> {
        self.children.iter().filter(move |child| child.name == name)
    }

    /// The text of the first child with this tag, where it has any.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        self.child(name).map(|child| child.text.as_str()).filter(|text| !text.is_empty())
    }

    /// The value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// This element and everything in it, depth first.
    pub fn walk(&self) -> impl Iterator<Item = &Self> {
        let mut open = vec![self];
        std::iter::from_fn(move || {
            let element = open.pop()?;
            open.extend(element.children.iter().rev());
            Some(element)
        })
    }
}

/// A document, with its first root element.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    /// The root; an empty element where there is none.
    pub root: Element,
    /// The document type, as written.
    pub doctype: Option<String>,
    /// Why the document could not be read to its end, where it could not.
    pub broken: Option<String>,
}

/// Reads as much of a document as can be read.
pub fn parse(text: &str) -> Document {
    let mut reader = Reader::from_str(text);
    reader.config_mut().check_end_names = false;
    let mut document = Document::default();
    // The elements open at the moment, the root's holder first; closing one hangs it into the one before.
    let mut open = vec![Element::default()];
    loop {
        let at = reader.buffer_position();
        match reader.read_event() {
            Ok(Event::Start(start)) if open.len() <= limits::XML_DEPTH => open.push(element(&start)),
            Ok(Event::Start(_)) => {
                document.broken = Some(format!("more than {} elements inside each other", limits::XML_DEPTH));
                break;
            }
            Ok(Event::Empty(start)) => close(&mut open, element(&start)),
            Ok(Event::End(_)) if open.len() > 1 => {
                let done = open.pop().unwrap_or_default();
                close(&mut open, done);
            }
            Ok(Event::End(_)) => {}
            Ok(Event::Text(text)) => add_text(&mut open, &text.decode().unwrap_or_default()),
            Ok(Event::CData(data)) => add_text(&mut open, &String::from_utf8_lossy(&data)),
            Ok(Event::GeneralRef(name)) => {
                let known = match &*name.decode().unwrap_or_default() {
                    "lt" => "<",
                    "gt" => ">",
                    "amp" => "&",
                    "apos" => "'",
                    "quot" => "\"",
                    _ => "",
                };
                add_text(&mut open, known);
            }
            Ok(Event::DocType(doctype)) => {
                document.doctype = Some(String::from_utf8_lossy(&doctype).trim().to_owned());
            }
            Ok(Event::Eof) => break,
            Ok(Event::Comment(_) | Event::Decl(_) | Event::PI(_)) => {}
            Err(error) => {
                document.broken = Some(format!("byte {at}: {error}"));
                break;
            }
        }
    }
    if open.len() > 1 && document.broken.is_none() {
        document.broken = Some(format!("cut off inside <{}>", open.last().map_or("", |last| &last.name)));
    }
    while open.len() > 1 {
        let done = open.pop().unwrap_or_default();
        close(&mut open, done);
    }
    document.root = open.pop().and_then(|holder| holder.children.into_iter().next()).unwrap_or_default();
    document
}

fn element(start: &BytesStart<'_>) -> Element {
    let attribute = |found: quick_xml::events::attributes::Attribute<'_>| {
        let key = String::from_utf8_lossy(found.key.as_ref()).into_owned();
        let raw = String::from_utf8_lossy(&found.value);
        let value = quick_xml::escape::unescape(&raw).map_or_else(|_| raw.to_string(), |plain| plain.into_owned());
        (key, value)
    };
    Element {
        name: String::from_utf8_lossy(start.name().as_ref()).into_owned(),
        attributes: start.attributes().with_checks(false).filter_map(Result::ok).map(attribute).collect(),
        ..Element::default()
    }
}

fn close(open: &mut [Element], mut done: Element) {
    done.text = done.text.trim().to_owned();
    if let Some(parent) = open.last_mut() {
        parent.children.push(done);
    }
}

fn add_text(open: &mut [Element], text: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_becomes_a_tree() {
        let document =
            parse(r#"<?xml version="1.0"?><!DOCTYPE log SYSTEM "x.dtd"><log a="1"><x>5 &amp; 6</x><y/></log>"#);
        assert_eq!(document.broken, None);
        assert_eq!(document.doctype.as_deref(), Some(r#"log SYSTEM "x.dtd""#));
        assert_eq!(document.root.attribute("a"), Some("1"));
        assert_eq!(document.root.text_of("x"), Some("5 & 6"));
        assert_eq!(document.root.walk().count(), 3);
    }

    #[test]
    fn a_document_that_is_cut_off_keeps_what_came_before() {
        let document = parse("<log><gpu><name>A</name></gpu><gpu><name>B");
        assert_eq!(document.root.children("gpu").count(), 2);
        assert!(document.broken.is_some());
        assert_eq!(parse("no xml at all").root, Element::default());
    }
}

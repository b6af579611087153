//! Finding and placing things in the tree that all forms of output are turned into.

use crate::told::Told;
use crate::xml::Element;

/// An element with a text and nothing in it.
pub(crate) fn leaf(name: &str, text: impl Into<String>) -> Element {
    Element { name: name.into(), text: text.into(), ..Element::default() }
}

/// Puts a text at a path below `element`, making the elements on the way where they are not there yet.
pub(crate) fn put(element: &mut Element, path: &[&str], text: &str) {
    match path {
        [] => {}
        [last] => element.children.push(leaf(last, text)),
        [first, rest @ ..] => {
            let known = element.children.iter().position(|child| child.name == *first);
            let place = known.unwrap_or_else(|| {
                element.children.push(leaf(first, ""));
                element.children.len() - 1
            });
            if let Some(child) = element.children.get_mut(place) {
                put(child, rest, text);
            }
        }
    }
}

/// The first of `fields` that has a value, in any of `sections` of `element`, or else the reason why none has.
///
/// Where a section is not there in parts but says in one word why, that word is the reason.
pub(crate) fn told<T>(
    element: &Element,
    sections: &[&str],
    fields: &[&str],
    parse: impl Fn(&str) -> Told<T>,
) -> Told<T> {
    let found = || element.children.iter().filter(|child| sections.contains(&child.name.as_str()));
    let mut told = Told::ABSENT;
    for field in fields {
        for child in found().flat_map(|section| section.children(field)) {
            told = told.or(parse(&child.text));
        }
    }
    if told.is_absent()
        && let Some(section) = found().find(|section| section.children.is_empty() && !section.text.is_empty())
    {
        return parse(&section.text);
    }
    told
}

/// The first text at any of these paths below `element` that `parse` makes something of.
pub(crate) fn first<T>(element: &Element, paths: &[&[&str]], parse: impl Fn(&str) -> Option<T>) -> Option<T> {
    paths.iter().find_map(|path| match path {
        [field] => element.children(field).find_map(|child| parse(&child.text)),
        [section, field] => {
            element.children(section).flat_map(|section| section.children(field)).find_map(|child| parse(&child.text))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &str) -> Told<u32> {
        Told::from_cell(text, |text| text.parse().ok())
    }

    #[test]
    fn a_value_is_found_whatever_it_is_called_and_however_often_it_is_there() {
        let mut gpu = Element::default();
        put(&mut gpu, &["old", "x"], "N/A");
        put(&mut gpu, &["new", "x"], "");
        put(&mut gpu, &["new", "y"], "5");
        put(&mut gpu, &["new", "y"], "6");
        assert_eq!(told(&gpu, &["old", "new"], &["x"], number), Told::Unsupported("N/A".into()));
        assert_eq!(told(&gpu, &["old", "new"], &["x", "y"], number), Told::Value(5));
        assert_eq!(told(&gpu, &["gone"], &["x"], number), Told::ABSENT);
        assert_eq!(first(&gpu, &[&["gone"], &["new", "y"]], |text| text.parse::<u8>().ok()), Some(5));
    }

    #[test]
    fn a_section_that_is_one_word_gives_the_reason() {
        let mut gpu = Element::default();
        put(&mut gpu, &["remapped_rows"], "N/A");
        assert_eq!(told(&gpu, &["remapped_rows"], &["pending"], number), Told::Unsupported("N/A".into()));
    }
}

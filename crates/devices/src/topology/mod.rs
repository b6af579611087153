//! How devices are joined, from files that other programs keep about it.
//!
//! NCCL and RCCL write what they found of the bus as XML ([`nccl`]), hwloc does as XML and as text ([`hwloc`]). Both
//! become devices with their way from the processor; how near two devices are follows from where their ways part.

pub mod hwloc;
pub mod nccl;
pub(crate) mod ways;

/// The tag of the first element of an XML document, found without reading the document.
fn root_tag(text: &str) -> Option<&str> {
    let mut rest = text.trim_start_matches('\u{feff}').trim_start();
    loop {
        let end = match rest {
            _ if rest.starts_with("<!--") => "-->",
            _ if rest.starts_with("<?") => "?>",
            _ if rest.starts_with("<!") => ">",
            _ => break,
        };
        let (_, after) = rest.split_once(end)?;
        rest = after.trim_start();
    }
    let tag = rest.strip_prefix('<')?;
    tag.split(|c: char| c.is_whitespace() || c == '>' || c == '/').next().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_is_found_behind_comments_and_declarations() {
        assert_eq!(
            root_tag("<?xml version=\"1.0\"?>\n<!-- <a> -->\n<!DOCTYPE b>\n<system version=\"1\">"),
            Some("system")
        );
        assert_eq!(root_tag("<graphs>"), Some("graphs"));
        assert_eq!(root_tag("\u{feff}<x/>"), Some("x"));
        for none in ["", "text <system>", "<!-- never closed", "<", "< system>"] {
            assert_eq!(root_tag(none), None, "{none}");
        }
    }
}

//! The environment of a lease as lines a shell can evaluate.

use gpupool_api::lease::Lease;

/// `export NAME='value'` and `unset NAME`, one a line. What is no name of a variable is left out: nothing but variables is
/// ever set by these lines, whatever the agent said.
pub(super) fn exports(lease: &Lease) -> String {
    let mut text = String::new();
    for (name, value) in lease.env.iter().filter(|(name, _)| is_name(name)) {
        text.push_str(&match value {
            Some(value) => format!("export {name}={}\n", quoted(value)),
            None => format!("unset {name}\n"),
        });
    }
    text
}

fn is_name(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A text that a shell takes as it is.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\0', "").replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_values_as_they_are_and_names_only_of_variables() {
        assert_eq!(quoted("a'b $(c)"), r"'a'\''b $(c)'");
        assert!(is_name("CUDA_VISIBLE_DEVICES") && is_name("_x1"));
        assert!(!is_name("") && !is_name("1A") && !is_name("A;rm") && !is_name("A B"));
    }
}

//! What texts may look like: hosts, paths of URLs, endpoints, names, backends.

use std::net::IpAddr;

use crate::value::Rule;

/// What `GPUPOOL_BACKEND` may name.
pub const BACKENDS: [&str; 8] = ["auto", "nvidia", "amd", "nvml", "nvidia-smi", "amd-sysfs", "amd-smi", "rocm-smi"];

pub(crate) const HOST: Rule =
    Rule { says: "an IP address or a host name, without scheme or port", empty: false, read: host };
pub(crate) const NAME: Rule = Rule { says: "1 to 253 letters, digits or . - _", empty: false, read: name };
pub(crate) const OWNER: Rule = Rule { says: "a name of 1 to 253 bytes", empty: false, read: short };
pub(crate) const TEXT: Rule = Rule { says: "a text of at most 253 bytes", empty: false, read: short };
pub(crate) const PAGE: Rule = Rule { says: "a path that begins with /, such as /docs", empty: false, read: page };
pub(crate) const PREFIX: Rule =
    Rule { says: "empty, or a path that begins with /, such as /api", empty: true, read: prefix };
pub(crate) const DEVICES: Rule =
    Rule { says: "indices or UUIDs of GPUs, separated by commas; empty for none", empty: true, read: devices };
pub(crate) const BACKEND: Rule = Rule {
    says: "one of auto, nvidia, amd, nvml, nvidia-smi, amd-sysfs, amd-smi, rocm-smi",
    empty: false,
    read: backend,
};
pub(crate) const SIMULATE: Rule = Rule {
    says: "devices such as 4xH100 or 2xMI300X,1xRTX4090, or a file that describes them",
    empty: false,
    read: long,
};
pub(crate) const ENDPOINT: Rule = Rule {
    says: "a URL such as http://gpu-box:8000 or unix:/run/gpupool/agent.sock (no user, query or fragment)",
    empty: false,
    read: endpoint,
};

const TEXT_BYTES: usize = 253;
const LONG_BYTES: usize = 4_096;

fn up_to(bytes: usize, text: &str) -> Option<String> {
    (!text.is_empty() && text.len() <= bytes && !text.chars().any(char::is_control)).then(|| text.to_owned())
}

fn short(text: &str) -> Option<String> {
    up_to(TEXT_BYTES, text)
}

fn long(text: &str) -> Option<String> {
    up_to(LONG_BYTES, text)
}

fn name(text: &str) -> Option<String> {
    short(text).filter(|text| text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)))
}

fn host(text: &str) -> Option<String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Some(address.to_string());
    }
    name(text)
}

fn page(text: &str) -> Option<String> {
    let path = short(text)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._~-".contains(c);
    (path.starts_with('/') && path.len() > 1 && !path.contains("//") && path.chars().all(plain))
        .then(|| path.trim_end_matches('/').to_owned())
}

fn prefix(text: &str) -> Option<String> {
    if text.is_empty() || text == "/" { Some(String::new()) } else { page(text) }
}

fn devices(text: &str) -> Option<String> {
    if text.is_empty() { Some(String::new()) } else { long(text) }
}

fn backend(text: &str) -> Option<String> {
    let name = text.to_ascii_lowercase().replace('_', "-");
    BACKENDS.contains(&name.as_str()).then_some(name)
}

/// An endpoint without its trailing `/`.
fn endpoint(text: &str) -> Option<String> {
    let text = long(text).filter(|text| !text.contains(char::is_whitespace))?;
    let (scheme, rest) = text.split_once(':')?;
    let scheme = scheme.to_ascii_lowercase();
    if scheme == "unix" {
        let path = rest.strip_prefix("//").unwrap_or(rest);
        return (path.starts_with('/') && path.len() > 1).then(|| format!("unix:{path}"));
    }
    let rest = rest.strip_prefix("//").filter(|_| matches!(scheme.as_str(), "http" | "https"))?;
    let authority = rest.split('/').next()?;
    let (host, port) = split_port(authority)?;
    let tidy =
        !rest.contains(['@', '?', '#', '\\']) && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    (tidy && self::host(host).is_some()).then(|| format!("{scheme}://{}", rest.trim_end_matches('/')))
}

fn split_port(authority: &str) -> Option<(&str, Option<&str>)> {
    if let Some(address) = authority.strip_prefix('[') {
        let (address, after) = address.split_once(']')?;
        return match after {
            "" => Some((address, None)),
            _ => Some((address, Some(after.strip_prefix(':')?))),
        };
    }
    Some(authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_needs_a_scheme_and_loses_its_trailing_slash() {
        assert_eq!(endpoint("http://gpu-box:8000//").as_deref(), Some("http://gpu-box:8000"));
        assert_eq!(endpoint("HTTPS://[::1]:8443/api/").as_deref(), Some("https://[::1]:8443/api"));
        assert_eq!(endpoint("unix:///run/agent.sock").as_deref(), Some("unix:/run/agent.sock"));
        for bad in [
            "gpu-box:8000",
            "http://",
            "http:/x",
            "ftp://x",
            "http://a b",
            "http://u:p@host",
            "http://h:99999",
            "http://h:0",
            "unix:agent.sock",
            "http://h/?q",
            "http://[::1",
            "http://[::1]x",
        ] {
            assert_eq!(endpoint(bad), None, "{bad}");
        }
    }

    #[test]
    fn hosts_and_paths_are_tidied() {
        assert_eq!(host("[::]").as_deref(), Some("::"));
        assert_eq!((host("http://x"), host("a:80"), host("")), (None, None, None));
        assert_eq!((prefix("/api/"), prefix("/"), prefix("api")), (Some("/api".into()), Some(String::new()), None));
        assert_eq!((page("/docs/"), page("/"), page("/a//b"), page("/a b")), (Some("/docs".into()), None, None, None));
        assert_eq!(backend("cuda"), None);
        assert_eq!(BACKEND.says, format!("one of {}", BACKENDS.join(", ")));
        assert_eq!(backend("NVIDIA_SMI").as_deref(), Some("nvidia-smi"));
    }
}

//! What endpoints are called: by their host while hosts are unique, else by host and port. Both are understood.

use std::collections::BTreeMap;

use crate::Endpoint;

/// The names of endpoints, in their order.
pub(super) fn names(endpoints: &[Endpoint]) -> Vec<String> {
    let mut hosts: BTreeMap<String, usize> = BTreeMap::new();
    for endpoint in endpoints {
        *hosts.entry(endpoint.host()).or_default() += 1;
    }
    let name = |endpoint: &Endpoint| match hosts.get(&endpoint.host()) {
        Some(1) => endpoint.host(),
        _ => endpoint.host_and_port(),
    };
    endpoints.iter().map(name).collect()
}

/// Whether somebody means this endpoint by a name: the one it has, its host and port, or its address.
pub(super) fn is_meant(said: &str, name: &str, endpoint: &Endpoint) -> bool {
    let said = said.trim().trim_end_matches('/');
    said == name || said == endpoint.host_and_port() || said == endpoint.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(urls: &[&str]) -> Vec<String> {
        names(&urls.iter().map(|url| url.parse().unwrap()).collect::<Vec<_>>())
    }

    #[test]
    fn hosts_that_are_unique_name_their_endpoints_and_others_need_the_port() {
        assert_eq!(named(&["http://server1:8000", "http://server2:8000"]), ["server1", "server2"]);
        assert_eq!(named(&["http://a:1", "http://a:2", "http://b"]), ["a_1", "a_2", "b"]);
        assert_eq!(named(&["https://a", "http://a"]), ["a_443", "a_80"]);
        assert_eq!(named(&["http://[::1]:7", "/run/agent.sock"]), ["::1", "/run/agent.sock"]);
        assert_eq!(named(&["http://a:1/x", "http://a:1/y"]), ["a_1", "a_1"]);
    }

    #[test]
    fn both_spellings_and_the_address_are_understood() {
        let endpoint: Endpoint = "http://server1:8000".parse().unwrap();
        for said in ["server1", "server1_8000", "http://server1:8000", "http://server1:8000/"] {
            assert!(is_meant(said, "server1", &endpoint), "{said}");
        }
        for said in ["server", "server1_80", "", "server2"] {
            assert!(!is_meant(said, "server1", &endpoint), "{said}");
        }
    }
}

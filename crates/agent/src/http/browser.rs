//! Requests that web pages make browsers send, and the names of this machine.
//!
//! A page of another site can make a browser on this machine send requests to this agent. `Sec-Fetch-Site`, or else
//! `Origin`, tells the site of the page. A page can also be served under a foreign name that its owner then points at this
//! machine (DNS rebinding); `Host` tells that name. Other programs choose these headers themselves: the checks protect the
//! users of browsers only.

use std::collections::BTreeSet;
use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{HeaderMap, Method, header};
use gpupool_config::Config;

use crate::net::{Peer, PeerTransport};

use super::AppState;
use super::problem::Problem;

const FETCH_SITE: &str = "sec-fetch-site";

/// Whether a browser sent the request: browsers set these headers, and pages cannot remove them.
pub(super) fn is_from_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.keys().any(|name| name.as_str().starts_with("sec-fetch-"))
}

/// Whether the client is on this machine. A proxy that forwards requests does not count.
pub(super) fn is_local_peer(peer: &Peer, headers: &HeaderMap) -> bool {
    let forwards = ["forwarded", "x-forwarded-for", "x-real-ip"].iter().any(|name| headers.contains_key(*name));
    peer.is_local() && !forwards
}

/// Refuses a request under a foreign host name, and a request of a page of another site that changes or reads anything but
/// statistics and pages.
pub(super) fn check_request(request: &Request, route: Option<&str>, app: &AppState) -> Result<(), Problem> {
    let headers = request.headers();
    let is_local_tcp = request
        .extensions()
        .get::<Peer>()
        .is_some_and(|peer| matches!(peer.transport(), PeerTransport::Tcp { .. }) && is_local_peer(peer, headers));
    if is_local_tcp || is_from_browser(headers) {
        check_host(headers, &app.own_names)?;
    }
    if is_for_own_pages_only(request.method(), route, &app.config.api.api_prefix) {
        check_site(headers)?;
    }
    Ok(())
}

/// Whether pages of other sites may not send the request: it may change something, or reads more than statistics and pages.
fn is_for_own_pages_only(method: &Method, route: Option<&str>, prefix: &str) -> bool {
    match *method {
        Method::GET | Method::HEAD => route.is_some_and(|route| {
            let route = route.strip_prefix(prefix).unwrap_or(route);
            route.starts_with("/v1/") || route == "/metrics" || route == "/config"
        }),
        // A preflight request, which gets no permission from the response.
        Method::OPTIONS => false,
        _ => true,
    }
}

fn check_host(headers: &HeaderMap, own_names: &OwnNames) -> Result<(), Problem> {
    let mut hosts = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or(""));
    let Some(foreign) = hosts.find(|host| !own_names.contains(host)) else { return Ok(()) };
    let detail = format!(
        "Host is {foreign:?}, which is not a name of this machine; use localhost, or add the name to server.allowed_hosts"
    );
    Err(Problem::forbidden("host_not_allowed", detail))
}

/// Refuses a request of a page of another site. Where a browser does not tell the site, the origin decides.
fn check_site(headers: &HeaderMap) -> Result<(), Problem> {
    let refuse = |name: &str, value: &str| {
        let detail = format!(
            "{name} is {value:?}; pages of other sites may read statistics only: open the pages of this agent itself"
        );
        Err(Problem::forbidden("origin_not_allowed", detail))
    };
    let text = |value: &axum::http::HeaderValue| value.to_str().unwrap_or("").to_owned();
    if headers.contains_key(FETCH_SITE) {
        let sites = headers.get_all(FETCH_SITE).iter().map(text);
        let foreign = sites.into_iter().find(|site| !matches!(site.as_str(), "same-origin" | "none"));
        return foreign.map_or(Ok(()), |site| refuse("Sec-Fetch-Site", &site));
    }
    let host = headers.get(header::HOST).map(text).unwrap_or_default();
    let is_own = |origin: &String| origin.split_once("://").is_some_and(|(_, of)| of.eq_ignore_ascii_case(&host));
    let foreign = headers.get_all(header::ORIGIN).iter().map(text).find(|origin| !is_own(origin));
    foreign.map_or(Ok(()), |origin| refuse("Origin", &origin))
}

/// The names under which this machine is known to itself: configured names, its host name with the domains of its
/// resolver, and its names in `/etc/hosts`. Addresses and `localhost` are always own.
#[derive(Debug, Default)]
pub(crate) struct OwnNames(BTreeSet<String>);

impl OwnNames {
    /// Reads the names of this machine, without asking a name server.
    pub(crate) fn read(config: &Config) -> Self {
        let text = |path| std::fs::read_to_string(path).unwrap_or_default();
        let (host_name, hosts) = (text("/proc/sys/kernel/hostname"), text("/etc/hosts"));
        let server = &config.server;
        let configured = [&server.host, &server.node_name].into_iter().chain(&server.allowed_hosts);
        Self::new(configured.map(String::as_str), host_name.trim(), &hosts, &text("/etc/resolv.conf"))
    }

    fn new<'a>(configured: impl Iterator<Item = &'a str>, host_name: &'a str, hosts: &'a str, resolver: &str) -> Self {
        let short = host_name.split('.').next().unwrap_or("");
        let domains = lines_of_words(resolver).filter(|words| matches!(words.first(), Some(&("search" | "domain"))));
        let full = domains.flat_map(|words| words.into_iter().skip(1)).map(|domain| format!("{short}.{domain}"));
        let is_of_this_machine = |words: &Vec<&str>| {
            let is_loopback = words.first().is_some_and(|it| it.parse().is_ok_and(|it: IpAddr| it.is_loopback()));
            is_loopback || words.iter().skip(1).any(|name| is_same(name, host_name) || is_same(name, short))
        };
        let aliases = lines_of_words(hosts).filter(is_of_this_machine).flat_map(|words| words.into_iter().skip(1));
        let names = configured.chain([host_name, short]).chain(aliases).map(ToOwned::to_owned).chain(full);
        let names = names.map(|name| without_dot(&name).to_ascii_lowercase());
        Self(names.filter(|name| !name.is_empty() && !name.starts_with('.')).collect())
    }

    /// Whether a `Host` is a name or an address of this machine.
    fn contains(&self, host: &str) -> bool {
        let name = without_dot(without_port(host)).to_ascii_lowercase();
        let is_address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        is_address || name == "localhost" || name.ends_with(".localhost") || self.0.contains(&name)
    }
}

/// Returns the words of each line, without comments.
fn lines_of_words(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.split(['#', ';']).next().unwrap_or("").split_whitespace().collect())
}

fn is_same(name: &str, other: &str) -> bool {
    !other.is_empty() && name.eq_ignore_ascii_case(other)
}

/// Returns a name without the dot that ends a full name.
fn without_dot(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

fn without_port(host: &str) -> &str {
    if host.starts_with('[') {
        return host.split_inclusive(']').next().unwrap_or(host);
    }
    host.rsplit_once(':').map_or(host, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn hosts_are_compared_without_their_port() {
        for (host, name) in
            [("a:1", "a"), ("a", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("1.2.3.4:5", "1.2.3.4")]
        {
            assert_eq!(without_port(host), name);
        }
    }

    #[test]
    fn own_names_are_those_of_the_kernel_the_resolver_the_hosts_file_and_the_settings() {
        let configured = ["node-7", "gpus.example"].into_iter();
        let hosts = "127.0.0.1 localhost loop # no.comment\n127.0.1.1 box.lab Box\n10.0.0.7 box.office box\n10.0.0.8 other\n0.0.0.0 ads";
        let names =
            OwnNames::new(configured, "box", hosts, "nameserver 10.0.0.1\nsearch cluster.example sub.example\n");
        for own in [
            "localhost:8000",
            "LOCALHOST",
            "a.localhost",
            "127.0.0.1:8000",
            "[::1]:8000",
            "192.0.2.7",
            "box",
            "BOX:80",
            "box.lab.",
            "box.office",
            "loop",
            "node-7",
            "gpus.example:443",
            "box.cluster.example",
            "box.sub.example",
        ] {
            assert!(names.contains(own), "{own}");
        }
        for foreign in [
            "",
            ":80",
            "localhost.evil",
            "evil.example",
            "127.0.0.1.evil",
            "other",
            "ads",
            "no.comment",
            "sub.example",
            "other.cluster.example",
            "[evil.example]",
            "localhost@evil",
        ] {
            assert!(!names.contains(foreign), "{foreign:?}");
        }
        let nameless = OwnNames::new([].into_iter(), "", "10.0.0.8 other", "search evil.example");
        assert!(!nameless.contains("other") && !nameless.contains(".evil.example"), "{nameless:?}");
    }

    #[test]
    fn the_site_of_a_page_decides_and_its_origin_where_the_site_is_not_told() {
        let host = ("host", "localhost:8000");
        for own in [
            vec![],
            vec![("sec-fetch-site", "same-origin")],
            vec![("sec-fetch-site", "none")],
            vec![("sec-fetch-mode", "cors")],
            vec![("origin", "http://localhost:8000")],
        ] {
            assert!(check_site(&headers(&[vec![host], own.clone()].concat())).is_ok(), "{own:?}");
        }
        for foreign in [
            vec![("sec-fetch-site", "cross-site")],
            vec![("sec-fetch-site", "same-site"), ("origin", "http://localhost:8000")],
            vec![("sec-fetch-site", "")],
            vec![("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")],
            vec![("origin", "http://localhost:8001")],
            vec![("origin", "http://localhost")],
            vec![("origin", "null")],
            vec![("origin", "http://localhost:8000"), ("origin", "http://evil.example")],
        ] {
            assert!(check_site(&headers(&[vec![host], foreign.clone()].concat())).is_err(), "{foreign:?}");
        }
    }

    #[test]
    fn pages_of_other_sites_may_read_statistics_and_open_pages() {
        let is_closed =
            |method: Method, route: Option<&str>, prefix: &str| is_for_own_pages_only(&method, route, prefix);
        for route in ["/", "/docs", "/redoc", "/gpu/stats", "/health", "/openapi.json", "/v1"] {
            assert!(!is_closed(Method::GET, Some(route), ""), "{route}");
            assert!(is_closed(Method::POST, Some(route), ""), "{route}");
        }
        for route in ["/v1/leases", "/v1/events", "/metrics", "/config"] {
            assert!(is_closed(Method::GET, Some(route), "") && is_closed(Method::HEAD, Some(route), ""), "{route}");
            assert!(is_closed(Method::GET, Some(&format!("/api{route}")), "/api"), "{route}");
            assert!(!is_closed(Method::OPTIONS, Some(route), ""), "{route}");
        }
        assert!(!is_closed(Method::GET, None, "") && is_closed(Method::DELETE, None, ""));
    }
}

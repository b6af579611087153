//! The address of an agent: a network address or a Unix socket of this machine.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use reqwest::Url;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::ClientError;
use crate::limits::MAX_SOCKET_PATH_BYTES;

/// Address of an agent if none is configured.
pub const DEFAULT_ADDRESS: &str = "http://localhost:8000";

/// Address of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint(EndpointAddress);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum EndpointAddress {
    /// A network address without a trailing slash.
    Web { base: String, is_loopback: bool, is_encrypted: bool },
    /// The path of a Unix socket of this machine.
    Unix(PathBuf),
}

impl Endpoint {
    /// Chooses the agent to use: the named one, else the one from the environment, else the one that listens on
    /// `socket`, else [`DEFAULT_ADDRESS`].
    pub fn choose(named: Option<&str>, environment: Option<&str>, socket: Option<&Path>) -> Result<Self, ClientError> {
        if let Some(named) = named {
            return named.parse();
        }
        if let Some(listed) = environment.map(split_endpoint_list).filter(|listed| !listed.is_empty()) {
            return match listed.as_slice() {
                [one] => one.parse(),
                several => Err(invalid(&several.join(","), "several endpoints are listed; choose one with --endpoint")),
            };
        }
        match socket.filter(|path| has_listener(path)) {
            Some(path) => Self::unix(path),
            None => DEFAULT_ADDRESS.parse(),
        }
    }

    /// Returns the agent that listens on the first of these sockets with a listener, else [`DEFAULT_ADDRESS`].
    pub fn local_agent(sockets: &[PathBuf]) -> Result<Self, ClientError> {
        let chosen = sockets.iter().map(|socket| Self::choose(None, None, Some(socket)));
        let listens = chosen.flatten().find(|endpoint| endpoint.socket().is_some());
        listens.map_or_else(|| Self::choose(None, None, None), Ok)
    }

    /// Returns the endpoint of a Unix socket.
    pub fn unix(path: impl Into<PathBuf>) -> Result<Self, ClientError> {
        let path = path.into();
        let length = path.as_os_str().len();
        if length == 0 || length > MAX_SOCKET_PATH_BYTES || path.as_os_str().as_encoded_bytes().contains(&0) {
            let reason = format!("the path of a socket must have 1..={MAX_SOCKET_PATH_BYTES} bytes, not {length}");
            return Err(invalid(&path.to_string_lossy(), &reason));
        }
        Ok(Self(EndpointAddress::Unix(path)))
    }

    /// Whether the address alone shows that the agent is on this machine.
    pub fn is_local(&self) -> bool {
        match &self.0 {
            EndpointAddress::Web { is_loopback, .. } => *is_loopback,
            EndpointAddress::Unix(_) => true,
        }
    }

    /// Returns the path of the Unix socket; `None` for a network address.
    pub fn socket(&self) -> Option<&Path> {
        match &self.0 {
            EndpointAddress::Web { .. } => None,
            EndpointAddress::Unix(path) => Some(path),
        }
    }

    /// Whether the connection uses TLS.
    pub fn is_encrypted(&self) -> bool {
        matches!(self.0, EndpointAddress::Web { is_encrypted: true, .. })
    }

    /// Returns the host of the address, or the path of the socket.
    pub(crate) fn host(&self) -> String {
        self.url().map_or_else(|| self.path(), |url| bare_host(&url))
    }

    /// Returns the host and port joined by an underscore, or the path of the socket.
    pub(crate) fn host_and_port(&self) -> String {
        let named = |url: Url| format!("{}_{}", bare_host(&url), url.port_or_known_default().unwrap_or_default());
        self.url().map_or_else(|| self.path(), named)
    }

    fn url(&self) -> Option<Url> {
        match &self.0 {
            EndpointAddress::Web { base, .. } => base.parse().ok(),
            EndpointAddress::Unix(_) => None,
        }
    }

    fn path(&self) -> String {
        self.socket().map(|path| path.display().to_string()).unwrap_or_default()
    }

    /// Returns the URL of a route.
    pub(crate) fn address(&self, route: &str) -> String {
        match &self.0 {
            EndpointAddress::Web { base, .. } => format!("{base}{route}"),
            EndpointAddress::Unix(_) => format!("http://localhost{route}"),
        }
    }
}

impl FromStr for Endpoint {
    type Err = ClientError;

    fn from_str(text: &str) -> Result<Self, ClientError> {
        let text = text.trim();
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') {
                return Err(invalid(text, "the path of the socket must start with /"));
            }
            return Self::unix(path);
        }
        let is_web = ["http://", "https://"]
            .iter()
            .any(|scheme| text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)));
        if is_web {
            return parse_web_address(text);
        }
        if text.contains("://") {
            return Err(invalid(text, "unknown scheme"));
        }
        if text.contains('/') {
            return Self::unix(text);
        }
        let reason =
            if text.is_empty() { "the address is empty".into() } else { format!("write http://{text} or ./{text}") };
        Err(invalid(text, &reason))
    }
}

fn parse_web_address(text: &str) -> Result<Endpoint, ClientError> {
    let url: Url = text.parse().map_err(|error| invalid(text, &format!("not an address ({error})")))?;
    if !url.username().is_empty() || url.password().is_some() {
        // Not shown: the address contains a password.
        return Err(invalid(
            "(an address with a user)",
            "user names and passwords are not supported in addresses; use GPUPOOL_TOKEN",
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(invalid(text, "an address must not contain ? or #"));
    }
    let host = url.host_str().ok_or_else(|| invalid(text, "the host is missing"))?;
    let is_loopback = is_loopback(host);
    let base = url.as_str().trim_end_matches('/').to_owned();
    Ok(Endpoint(EndpointAddress::Web { base, is_loopback, is_encrypted: url.scheme() == "https" }))
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            EndpointAddress::Web { base, .. } => f.write_str(base),
            EndpointAddress::Unix(path) if path.is_absolute() => write!(f, "unix://{}", path.display()),
            EndpointAddress::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

fn bare_host(url: &Url) -> String {
    url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned()
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

/// Splits a comma-separated list; drops blanks, duplicates and trailing slashes.
pub(crate) fn split_endpoint_list(list: &str) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for name in list.split(',').map(|name| name.trim().trim_end_matches('/')) {
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Whether a process listens on a socket. Never blocks, even if the agent is stopped (SIGSTOP).
fn has_listener(path: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    matches!(connect(&socket, &address), Ok(()) | Err(Errno::AGAIN))
}

fn invalid(value: &str, reason: &str) -> ClientError {
    ClientError::InvalidEndpoint { value: value.into(), reason: reason.into() }
}

// Endpoint ids: the host while hosts are unique, else host and port. Calls accept both spellings.

/// Returns the ids of endpoints, in their order.
pub(crate) fn endpoint_ids(endpoints: &[Endpoint]) -> Vec<String> {
    let hosts: Vec<String> = endpoints.iter().map(Endpoint::host).collect();
    let is_unique = |host: &String| hosts.iter().filter(|other| *other == host).count() == 1;
    let name = |(endpoint, host): (&Endpoint, &String)| {
        if is_unique(host) { host.clone() } else { endpoint.host_and_port() }
    };
    endpoints.iter().zip(&hosts).map(name).collect()
}

/// Whether a given name means this endpoint: by its id, its host and port, or its address.
pub(crate) fn matches_endpoint(name_given: &str, name: &str, endpoint: &Endpoint) -> bool {
    let name_given = name_given.trim().trim_end_matches('/');
    name_given == name || name_given == endpoint.host_and_port() || name_given == endpoint.to_string()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn parse_and_print(text: &str) -> String {
        text.parse::<Endpoint>().map_or_else(|error| error.to_string(), |endpoint| endpoint.to_string())
    }

    #[test]
    fn addresses_are_parsed_and_normalized() {
        assert_eq!(parse_and_print("http://localhost:8000/"), "http://localhost:8000");
        assert_eq!(parse_and_print("HTTPS://Gpu7:443/pool/"), "https://gpu7/pool");
        assert_eq!(parse_and_print("unix:///run/gpupool/agent.sock"), "unix:///run/gpupool/agent.sock");
        assert_eq!(parse_and_print(" /run/gpupool/agent.sock "), "unix:///run/gpupool/agent.sock");
        assert_eq!(parse_and_print("./agent.sock"), "./agent.sock");
        let endpoint: Endpoint = "https://gpu7/pool".parse().unwrap();
        assert_eq!(endpoint.address("/v1/pool"), "https://gpu7/pool/v1/pool");
        assert!(endpoint.is_encrypted() && !endpoint.is_local());
    }

    #[test]
    fn a_malformed_address_is_named_with_the_allowed_forms() {
        let cases = [
            ("localhost:8000", "http://localhost:8000"),
            ("", "empty"),
            ("ftp://x", "scheme"),
            ("unix://x.sock", "start with /"),
            ("http://", "address"),
            ("http://x/?a=1", "? or #"),
            ("http://[::1", "address"),
        ];
        for (text, says) in cases {
            let error = parse_and_print(text);
            assert!(error.contains(&format!("{text:?}")) && error.contains(says), "{error}");
            assert!(error.contains("unix:///PATH"), "{error}");
        }
        assert!(parse_and_print(&format!("/{}", "x".repeat(MAX_SOCKET_PATH_BYTES))).contains("1..=107"));
    }

    #[test]
    fn a_password_in_an_address_is_refused_and_not_shown() {
        let error = parse_and_print("http://me:hush@gpu7:8000");
        assert!(error.contains("GPUPOOL_TOKEN") && !error.contains("hush"), "{error}");
    }

    #[test]
    fn loopback_addresses_are_local() {
        for local in ["http://localhost", "http://127.3.2.1:8", "http://[::1]:8", "http://a.localhost", "/x.sock"] {
            assert!(local.parse::<Endpoint>().unwrap().is_local(), "{local}");
        }
        for remote in ["http://localhost.evil", "http://10.0.0.1", "http://127.evil"] {
            assert!(!remote.parse::<Endpoint>().unwrap().is_local(), "{remote}");
        }
    }

    #[test]
    fn the_named_agent_wins_then_the_environment_then_a_socket_with_a_listener() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let chosen = |named, environment| {
            Endpoint::choose(named, environment, Some(&socket)).map_or_else(|e| e.to_string(), |e| e.to_string())
        };
        assert_eq!(chosen(None, None), DEFAULT_ADDRESS);
        let listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(chosen(None, None), format!("unix://{}", socket.display()));
        assert_eq!(chosen(None, Some(" , http://a:1/, http://a:1 ")), "http://a:1");
        assert_eq!(chosen(Some("http://b:2"), Some("http://a:1")), "http://b:2");
        assert!(chosen(None, Some("http://a:1,http://b:2")).contains("several"));
        drop(listener);
        assert_eq!(chosen(None, Some("")), DEFAULT_ADDRESS, "a socket file without a listener is no agent");
    }

    fn ids_of(urls: &[&str]) -> Vec<String> {
        endpoint_ids(&urls.iter().map(|url| url.parse().unwrap()).collect::<Vec<_>>())
    }

    #[test]
    fn unique_hosts_are_ids_and_others_need_the_port() {
        assert_eq!(ids_of(&["http://server1:8000", "http://server2:8000"]), ["server1", "server2"]);
        assert_eq!(ids_of(&["http://a:1", "http://a:2", "http://b"]), ["a_1", "a_2", "b"]);
        assert_eq!(ids_of(&["https://a", "http://a"]), ["a_443", "a_80"]);
        assert_eq!(ids_of(&["http://[::1]:7", "/run/agent.sock"]), ["::1", "/run/agent.sock"]);
        assert_eq!(ids_of(&["http://a:1/x", "http://a:1/y"]), ["a_1", "a_1"]);
    }

    #[test]
    fn both_spellings_and_the_address_match_an_endpoint() {
        let endpoint: Endpoint = "http://server1:8000".parse().unwrap();
        for name_given in ["server1", "server1_8000", "http://server1:8000", "http://server1:8000/"] {
            assert!(matches_endpoint(name_given, "server1", &endpoint), "{name_given}");
        }
        for name_given in ["server", "server1_80", "", "server2"] {
            assert!(!matches_endpoint(name_given, "server1", &endpoint), "{name_given}");
        }
    }
}

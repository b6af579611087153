//! Where an agent answers: an address on the network, or a Unix socket of this machine.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use reqwest::Url;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::ClientError;
use crate::limits::SOCKET_PATH_BYTES;

/// Where an agent answers unless anything says otherwise.
pub const DEFAULT: &str = "http://localhost:8000";

/// Where an agent answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint(Kind);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kind {
    /// An address without a slash at its end.
    Web { base: String, is_loopback: bool, is_encrypted: bool },
    /// A socket of this machine.
    Unix(PathBuf),
}

impl Endpoint {
    /// Which agent to ask: the one that is named, else the one the environment names, else the one that listens on
    /// `socket`, else [`DEFAULT`].
    pub fn choose(
        named: Option<&str>,
        from_environment: Option<&str>,
        socket: Option<&Path>,
    ) -> Result<Self, ClientError> {
        if let Some(named) = named {
            return named.parse();
        }
        if let Some(listed) = from_environment.map(listed).filter(|listed| !listed.is_empty()) {
            return match listed.as_slice() {
                [one] => one.parse(),
                several => Err(invalid(&several.join(","), "these are several; choose one with --endpoint")),
            };
        }
        match socket.filter(|path| is_listened_on(path)) {
            Some(path) => Self::unix(path),
            None => DEFAULT.parse(),
        }
    }

    /// The agent that listens on the first of these sockets that anybody listens on, else [`DEFAULT`].
    pub fn local_agent(sockets: &[PathBuf]) -> Result<Self, ClientError> {
        let chosen = sockets.iter().map(|socket| Self::choose(None, None, Some(socket)));
        let listens = chosen.flatten().find(|endpoint| endpoint.socket().is_some());
        listens.map_or_else(|| Self::choose(None, None, None), Ok)
    }

    /// The agent that listens on a Unix socket.
    pub fn unix(path: impl Into<PathBuf>) -> Result<Self, ClientError> {
        let path = path.into();
        let length = path.as_os_str().len();
        if length == 0 || length > SOCKET_PATH_BYTES || path.as_os_str().as_encoded_bytes().contains(&0) {
            let reason = format!("the path of a socket has 1..={SOCKET_PATH_BYTES} bytes, this one {length}");
            return Err(invalid(&path.to_string_lossy(), &reason));
        }
        Ok(Self(Kind::Unix(path)))
    }

    /// Whether it is on this machine, by its address alone.
    pub fn is_local(&self) -> bool {
        match &self.0 {
            Kind::Web { is_loopback, .. } => *is_loopback,
            Kind::Unix(_) => true,
        }
    }

    /// The path of its Unix socket, where it has one.
    pub fn socket(&self) -> Option<&Path> {
        match &self.0 {
            Kind::Web { .. } => None,
            Kind::Unix(path) => Some(path),
        }
    }

    /// Whether it is reached over TLS.
    pub fn is_encrypted(&self) -> bool {
        matches!(self.0, Kind::Web { is_encrypted: true, .. })
    }

    /// Its host, or the path of its socket.
    pub(crate) fn host(&self) -> String {
        self.url().map_or_else(|| self.path(), |url| bare_host(&url))
    }

    /// Its host and port with an underscore between, or the path of its socket.
    pub(crate) fn host_and_port(&self) -> String {
        let named = |url: Url| format!("{}_{}", bare_host(&url), url.port_or_known_default().unwrap_or_default());
        self.url().map_or_else(|| self.path(), named)
    }

    fn url(&self) -> Option<Url> {
        match &self.0 {
            Kind::Web { base, .. } => base.parse().ok(),
            Kind::Unix(_) => None,
        }
    }

    fn path(&self) -> String {
        self.socket().map(|path| path.display().to_string()).unwrap_or_default()
    }

    /// The address of a route.
    pub(crate) fn address(&self, route: &str) -> String {
        match &self.0 {
            Kind::Web { base, .. } => format!("{base}{route}"),
            Kind::Unix(_) => format!("http://localhost{route}"),
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
                return Err(invalid(text, "the path of the socket must start at /"));
            }
            return Self::unix(path);
        }
        let is_web = ["http://", "https://"]
            .iter()
            .any(|scheme| text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)));
        if is_web {
            return web(text);
        }
        if text.contains("://") {
            return Err(invalid(text, "this scheme is not known"));
        }
        if text.contains('/') {
            return Self::unix(text);
        }
        let reason = if text.is_empty() { "it is empty".into() } else { format!("write http://{text} or ./{text}") };
        Err(invalid(text, &reason))
    }
}

fn web(text: &str) -> Result<Endpoint, ClientError> {
    let url: Url = text.parse().map_err(|error| invalid(text, &format!("not an address ({error})")))?;
    if !url.username().is_empty() || url.password().is_some() {
        // Not shown: it has a password in it.
        return Err(invalid("(an address with a user)", "a user in an address does not count here; use GPUPOOL_TOKEN"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(invalid(text, "only the address is wanted, without ? and #"));
    }
    let host = url.host_str().ok_or_else(|| invalid(text, "the host is missing"))?;
    let is_loopback = is_loopback(host);
    let base = url.as_str().trim_end_matches('/').to_owned();
    Ok(Endpoint(Kind::Web { base, is_loopback, is_encrypted: url.scheme() == "https" }))
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Web { base, .. } => f.write_str(base),
            Kind::Unix(path) if path.is_absolute() => write!(f, "unix://{}", path.display()),
            Kind::Unix(path) => write!(f, "{}", path.display()),
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

/// What a comma list names: without blanks, duplicates and slashes at the end.
pub(crate) fn listed(list: &str) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for name in list.split(',').map(|name| name.trim().trim_end_matches('/')) {
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Whether somebody listens on a socket. Never waits, also not for an agent that is stopped.
fn is_listened_on(path: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    matches!(connect(&socket, &address), Ok(()) | Err(Errno::AGAIN))
}

fn invalid(value: &str, reason: &str) -> ClientError {
    ClientError::InvalidEndpoint { value: value.into(), reason: reason.into() }
}

// What endpoints are called: by their host while hosts are unique, else by host and port. Both are understood.

/// The names of endpoints, in their order.
pub(crate) fn names(endpoints: &[Endpoint]) -> Vec<String> {
    let hosts: Vec<String> = endpoints.iter().map(Endpoint::host).collect();
    let is_unique = |host: &String| hosts.iter().filter(|other| *other == host).count() == 1;
    let name = |(endpoint, host): (&Endpoint, &String)| {
        if is_unique(host) { host.clone() } else { endpoint.host_and_port() }
    };
    endpoints.iter().zip(&hosts).map(name).collect()
}

/// Whether somebody means this endpoint by a name: the one it has, its host and port, or its address.
pub(crate) fn is_meant(said: &str, name: &str, endpoint: &Endpoint) -> bool {
    let said = said.trim().trim_end_matches('/');
    said == name || said == endpoint.host_and_port() || said == endpoint.to_string()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn shown(text: &str) -> String {
        text.parse::<Endpoint>().map_or_else(|error| error.to_string(), |endpoint| endpoint.to_string())
    }

    #[test]
    fn addresses_are_read_as_people_write_them() {
        assert_eq!(shown("http://localhost:8000/"), "http://localhost:8000");
        assert_eq!(shown("HTTPS://Gpu7:443/pool/"), "https://gpu7/pool");
        assert_eq!(shown("unix:///run/gpupool/agent.sock"), "unix:///run/gpupool/agent.sock");
        assert_eq!(shown(" /run/gpupool/agent.sock "), "unix:///run/gpupool/agent.sock");
        assert_eq!(shown("./agent.sock"), "./agent.sock");
        let endpoint: Endpoint = "https://gpu7/pool".parse().unwrap();
        assert_eq!(endpoint.address("/v1/pool"), "https://gpu7/pool/v1/pool");
        assert!(endpoint.is_encrypted() && !endpoint.is_local());
    }

    #[test]
    fn a_bad_address_is_named_with_what_is_allowed() {
        let cases = [
            ("localhost:8000", "http://localhost:8000"),
            ("", "empty"),
            ("ftp://x", "scheme"),
            ("unix://x.sock", "start at /"),
            ("http://", "address"),
            ("http://x/?a=1", "without ?"),
            ("http://[::1", "address"),
        ];
        for (text, says) in cases {
            let error = shown(text);
            assert!(error.contains(&format!("{text:?}")) && error.contains(says), "{error}");
            assert!(error.contains("unix:///PATH"), "{error}");
        }
        assert!(shown(&format!("/{}", "x".repeat(SOCKET_PATH_BYTES))).contains("1..=107"));
    }

    #[test]
    fn a_password_in_an_address_is_refused_and_not_repeated() {
        let error = shown("http://me:hush@gpu7:8000");
        assert!(error.contains("GPUPOOL_TOKEN") && !error.contains("hush"), "{error}");
    }

    #[test]
    fn loopback_is_known_by_its_address() {
        for local in ["http://localhost", "http://127.3.2.1:8", "http://[::1]:8", "http://a.localhost", "/x.sock"] {
            assert!(local.parse::<Endpoint>().unwrap().is_local(), "{local}");
        }
        for remote in ["http://localhost.evil", "http://10.0.0.1", "http://127.evil"] {
            assert!(!remote.parse::<Endpoint>().unwrap().is_local(), "{remote}");
        }
    }

    #[test]
    fn the_named_agent_wins_then_the_environment_then_a_socket_that_is_listened_on() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let chosen = |named, environment| {
            Endpoint::choose(named, environment, Some(&socket)).map_or_else(|e| e.to_string(), |e| e.to_string())
        };
        assert_eq!(chosen(None, None), DEFAULT);
        let listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(chosen(None, None), format!("unix://{}", socket.display()));
        assert_eq!(chosen(None, Some(" , http://a:1/, http://a:1 ")), "http://a:1");
        assert_eq!(chosen(Some("http://b:2"), Some("http://a:1")), "http://b:2");
        assert!(chosen(None, Some("http://a:1,http://b:2")).contains("several"));
        drop(listener);
        assert_eq!(chosen(None, Some("")), DEFAULT, "a socket file nobody listens on is no agent");
    }

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

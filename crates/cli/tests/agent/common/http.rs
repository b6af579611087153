//! HTTP as bytes, for requests that a client library would refuse to send, and for threads of other users.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use gpupool_testkit::{DEADLINE, TestAgent};
use serde_json::Value;

/// An address of an agent.
#[derive(Debug, Clone)]
pub enum RawEndpoint {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A connection over TCP or the Unix socket.
pub trait Connection: Read + Write + Send {}
impl Connection for TcpStream {}
impl Connection for UnixStream {}

impl RawEndpoint {
    /// Returns the TCP port on loopback.
    pub fn tcp(agent: &TestAgent) -> Self {
        Self::Tcp(([127, 0, 0, 1], agent.port()).into())
    }

    /// Returns the Unix socket.
    pub fn unix(agent: &TestAgent) -> Self {
        Self::Unix(agent.socket().to_owned())
    }

    pub fn connect(&self) -> io::Result<Box<dyn Connection>> {
        Ok(match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_read_timeout(Some(DEADLINE))?;
                Box::new(stream)
            }
            Self::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(DEADLINE))?;
                Box::new(stream)
            }
        })
    }

    /// Sends a request and reads the whole response.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&str>) -> RawResponse {
        let mut stream = self.connect().unwrap();
        stream.write_all(request(method, path, headers, body).as_bytes()).unwrap();
        RawResponse::read(&mut stream).unwrap_or_else(|error| panic!("{method} {path}: {error}"))
    }

    pub fn get(&self, path: &str) -> RawResponse {
        self.send("GET", path, &[], None)
    }

    pub fn post(&self, path: &str, body: &Value) -> RawResponse {
        self.send("POST", path, &[], Some(&body.to_string()))
    }
}

/// Returns the text of a request that closes its connection. `Host` defaults to `localhost`.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: Option<&str>) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        text.push_str("Host: localhost\r\n");
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if let Some(body) = body {
        text.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()));
    }
    text + "\r\n" + body.unwrap_or("")
}

/// A response.
#[derive(Debug, Clone)]
pub struct RawResponse {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl RawResponse {
    /// Reads to the end of the connection.
    pub fn read(stream: &mut impl Read) -> io::Result<Self> {
        let mut bytes = Vec::new();
        if let Err(error) = stream.read_to_end(&mut bytes) {
            // A reset after the response does no harm.
            if bytes.is_empty() || error.kind() != io::ErrorKind::ConnectionReset {
                return Err(error);
            }
        }
        Self::parse(&bytes)
            .ok_or_else(|| io::Error::other(format!("no response: {:?}", String::from_utf8_lossy(&bytes))))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
        let head = std::str::from_utf8(&bytes[..end]).ok()?;
        let mut lines = head.split("\r\n");
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
        let headers: Vec<_> = lines.filter_map(header).collect();
        let is_chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        let body = &bytes[end + 4..];
        let body = if is_chunked { decode_chunks(body)? } else { body.to_vec() };
        Some(Self { status, headers, body })
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}: {}", self.status, self.text()))
    }

    /// Returns the code of a problem; empty for other bodies.
    pub fn code(&self) -> String {
        let body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        body["code"].as_str().unwrap_or("").to_owned()
    }
}

fn decode_chunks(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).ok()?, 16).ok()?;
        rest = &rest[end + 2..];
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size + 2..)?;
    }
}

/// Returns whether a connection stays open without a byte for this long.
pub fn stays_silent(stream: &mut TcpStream, wait: Duration) -> bool {
    stream.set_read_timeout(Some(wait)).unwrap();
    let read = stream.read(&mut [0; 64]);
    matches!(read, Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut))
}

//! Puts load on an agent and measures its response times, for `benches/run-agent`.
//!
//! - `load pairs ADDRESS CLIENTS SECONDS`: each client requests a tenth of a GPU and releases it, repeatedly, on its
//!   own connection. Prints pairs per second, then median and 99th percentile of requests and of releases, in µs.
//! - `load wait ADDRESS N MODEL`: sends N requests that wait for a GPU of a model, each on an open connection, until
//!   the end of standard input.
//! - `load start PROGRAM ARGUMENTS…`: prints the milliseconds from the start of an agent to its first response, and
//!   stops the agent.
//! - `load sync DIRECTORY SECONDS`: prints median and 99th percentile, in µs, of appending 4 KiB to a file there with
//!   `fdatasync`, then of overwriting 4 KiB, which does not change the size and is the most common write of a
//!   write-ahead log.
//!
//! Threads and plain sockets, so that this program is faster than the agent that it measures.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["pairs", address, clients, seconds] => pairs(address, clients.parse()?, seconds.parse()?),
        ["wait", address, count, model] => wait(address, count.parse()?, model),
        ["start", program, ..] => start(program, &arguments[2..]),
        ["sync", directory, seconds] => sync(Path::new(directory), seconds.parse()?),
        _ => Err("usage: load pairs|wait|start|sync …; see the top of load.rs".into()),
    }
}

/// Durations of all requests and all releases.
type Times = (Vec<Duration>, Vec<Duration>);

fn pairs(address: &str, clients: usize, seconds: f64) -> Outcome<()> {
    let begin = Instant::now();
    let end = begin + Duration::from_secs_f64(seconds);
    let start = |_| {
        let address = address.to_owned();
        thread::spawn(move || take_and_give_back(&address, end))
    };
    let running: Vec<_> = (0..clients).map(start).collect();
    let (mut asking, mut giving) = (Vec::new(), Vec::new());
    for client in running {
        let times = client.join().map_err(|_| "a client panicked")??;
        asking.extend(times.0);
        giving.extend(times.1);
    }
    let rate = giving.len() as f64 / begin.elapsed().as_secs_f64();
    println!("{rate:.0} {} {}", spread(&mut asking), spread(&mut giving));
    Ok(())
}

fn take_and_give_back(address: &str, end: Instant) -> Outcome<Times> {
    let mut connection = Connection::open(address)?;
    let (mut asking, mut giving) = (Vec::new(), Vec::new());
    while Instant::now() < end {
        let asked = Instant::now();
        let lease = connection.ask("POST", "/v1/leases", r#"{"fraction":0.1}"#, 201)?;
        asking.push(asked.elapsed());
        let path = format!("/v1/leases/{}", number_of(&lease)?);
        let released = Instant::now();
        connection.ask("DELETE", &path, "", 200)?;
        giving.push(released.elapsed());
    }
    Ok((asking, giving))
}

fn wait(address: &str, count: usize, model: &str) -> Outcome<()> {
    let body = format!(r#"{{"select":{{"model":"{model}"}},"wait_secs":300}}"#);
    let mut open = Vec::with_capacity(count);
    for _ in 0..count {
        let mut connection = Connection::open(address)?;
        connection.send("POST", "/v1/leases", &body)?;
        open.push(connection);
    }
    let mut looking = Connection::open(address)?;
    let all = format!("\"waiting\":{count},");
    while !looking.ask("GET", "/v1/pool", "", 200)?.contains(&all) {
        thread::sleep(Duration::from_millis(50));
    }
    println!("{count} wait");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn start(program: &str, arguments: &[String]) -> Outcome<()> {
    let begin = Instant::now();
    let mut agent = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn()?;
    let answered = first_answer(&mut agent, begin);
    agent.kill()?;
    agent.wait()?;
    println!("{:.1}", answered?.as_secs_f64() * 1e3);
    Ok(())
}

fn first_answer(agent: &mut std::process::Child, begin: Instant) -> Outcome<Duration> {
    let said = BufReader::new(agent.stdout.take().ok_or("no standard output")?);
    for line in said.lines() {
        if let Some((_, address)) = line?.split_once("listening on http://") {
            Connection::open(address)?.ask("GET", "/gpu/stats", "", 200)?;
            return Ok(begin.elapsed());
        }
    }
    Err("the agent ended before it listened".into())
}

fn sync(directory: &Path, seconds: f64) -> Outcome<()> {
    let path = directory.join("bare-sync");
    let file = File::create(&path)?;
    let (mut appending, mut overwriting) = (Vec::new(), Vec::new());
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut size = 0;
    while Instant::now() < end {
        appending.push(write_at(&file, size)?);
        overwriting.push(write_at(&file, size)?);
        size += 4096;
    }
    fs::remove_file(path)?;
    println!("{} {}", spread(&mut appending), spread(&mut overwriting));
    Ok(())
}

fn write_at(file: &File, place: u64) -> Outcome<Duration> {
    let begin = Instant::now();
    file.write_all_at(&[7; 4096], place)?;
    file.sync_data()?;
    Ok(begin.elapsed())
}

/// Returns median and 99th percentile in whole µs.
fn spread(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |percent: usize| times.get(times.len() * percent / 100).map_or(0, Duration::as_micros);
    format!("{} {}", at(50), at(99))
}

fn number_of(lease: &str) -> Outcome<u64> {
    let digits = lease.split_once("\"id\":").and_then(|(_, rest)| rest.split(',').next());
    Ok(digits.ok_or_else(|| format!("no id in {lease}"))?.parse()?)
}

/// One keep-alive connection; every response has its length in a header.
struct Connection {
    address: String,
    stream: BufReader<TcpStream>,
}

impl Connection {
    fn open(address: &str) -> Outcome<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        // Small, because there may be ten thousand.
        Ok(Self { address: address.to_owned(), stream: BufReader::with_capacity(2048, stream) })
    }

    fn send(&mut self, method: &str, path: &str, body: &str) -> Outcome<()> {
        let (host, length) = (&self.address, body.len());
        let request = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n\r\n{body}");
        Ok(self.stream.get_mut().write_all(request.as_bytes())?)
    }

    fn ask(&mut self, method: &str, path: &str, body: &str, expected: u16) -> Outcome<String> {
        self.send(method, path, body)?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut length = 0;
        loop {
            line.clear();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(format!("{method} {path}: the connection was closed").into());
            }
            if line == "\r\n" {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse()?;
            }
        }
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer)?;
        let answer = String::from_utf8(answer)?;
        if status == expected.to_string() {
            Ok(answer)
        } else {
            Err(format!("{method} {path}: {status} {answer}").into())
        }
    }
}

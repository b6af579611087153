//! A worker that obeys its tasks, however odd: `echo TEXT`, `sleep MILLISECONDS`, `fail TEXT`, `exit CODE`, `kill`, and
//! more below. Also the supervisor and runner for programs that cannot be their own, such as tests.

use std::io::Write as _;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gpupool_dispatch::TaskId;
use gpupool_dispatch::worker::{TaskWorker, WorkerHello, serve_tasks};

struct OddWorker {
    hello: WorkerHello,
}

impl TaskWorker for OddWorker {
    fn set_up(hello: &WorkerHello) -> Result<Self, String> {
        let setting = |name: &str| hello.settings[name].as_str().map(str::to_owned);
        if let Some(text) = setting("write") {
            eprintln!("{text}");
        }
        match (setting("setup").as_deref(), hello.worker_id) {
            (Some("fail"), _) => Err("the model is not there".into()),
            (Some("exit"), _) => std::process::exit(7),
            (Some("hang"), _) => loop {
                std::thread::sleep(Duration::from_secs(600));
            },
            (Some("fail first"), 0) => Err("this one never works".into()),
            _ => Ok(Self { hello: hello.clone() }),
        }
    }

    fn process(&mut self, task: TaskId, payload: Bytes) -> Result<Bytes, String> {
        let text = String::from_utf8_lossy(&payload).into_owned();
        let (command, rest) = text.split_once(' ').unwrap_or((&text, ""));
        let number = || rest.parse::<u64>().unwrap_or(0);
        match command {
            "echo" => Ok(payload.slice(payload.len().min(5)..)),
            "task" => Ok(task.to_string().into()),
            "worker" => Ok(self.hello.worker_id.to_string().into()),
            "pid" => Ok(std::process::id().to_string().into()),
            "env" => Ok(std::env::var(rest).map_err(|error| error.to_string())?.into()),
            "say" => {
                eprintln!("{rest}");
                Ok(Bytes::new())
            }
            // Slow enough that other workers do much meanwhile.
            "chatter" => {
                let mut left = number();
                while left > 0 {
                    let now = left.min(1_000);
                    eprint!("{}", "x".repeat(usize::try_from(now).unwrap_or(0)));
                    left -= now;
                    std::thread::sleep(Duration::from_micros(500));
                }
                Ok(Bytes::new())
            }
            "fail" => Err(rest.to_owned()),
            "sleep" => {
                std::thread::sleep(Duration::from_millis(number()));
                Ok(Bytes::new())
            }
            "exit" => std::process::exit(i32::try_from(number()).unwrap_or(1)),
            "kill" => {
                signal_ourselves(libc::SIGKILL);
                Ok(Bytes::new())
            }
            "stop" => {
                signal_ourselves(libc::SIGSTOP);
                Ok(Bytes::new())
            }
            "stuck" => {
                ignore_interrupts();
                loop {
                    std::hint::spin_loop();
                }
            }
            "hog" => {
                let mut held: Vec<Vec<u8>> = Vec::new();
                for _ in 0..number() {
                    held.push(vec![1; 1 << 20]);
                }
                Ok(held.len().to_string().into())
            }
            "burn" => {
                let until = Instant::now() + Duration::from_millis(number());
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                Ok(Bytes::new())
            }
            // Orphaned processes: one child, and one that left the session and its parent.
            "spawn" => {
                let script = "sleep 1000 & setsid sh -c 'sleep 1000 & :' & :";
                Command::new("sh").args(["-c", script]).status().map_err(|error| error.to_string())?;
                Ok(Bytes::new())
            }
            "forks" => {
                let children: Vec<_> =
                    (0..number()).filter_map(|_| Command::new("sleep").arg("1000").spawn().ok()).collect();
                Ok(children.len().to_string().into())
            }
            "garbage" => write_to_socket(b"\xff\xff\xff\xff this is no frame"),
            "partial" => {
                write_to_socket(&[200, 0, 0, 0, 68, 1])?;
                std::process::exit(0)
            }
            "lie" => {
                // A result of an unknown task.
                let mut frame = vec![9, 0, 0, 0, 68];
                frame.extend_from_slice(&u64::MAX.to_le_bytes());
                write_to_socket(&frame)
            }
            // Repeats the started message without end.
            "flood" => {
                let mut frame = vec![9, 0, 0, 0, 67];
                frame.extend_from_slice(&task.0.to_le_bytes());
                let frames = frame.repeat(10_000);
                loop {
                    write_to_socket(&frames)?;
                }
            }
            "close" => {
                close_socket();
                loop {
                    std::thread::sleep(Duration::from_secs(600));
                }
            }
            other => Err(format!("unknown task {other}")),
        }
    }

    fn clean_up(self) -> Result<(), String> {
        match self.hello.settings["clean_up"].as_str() {
            Some("fail") => Err("could not save".into()),
            Some("hang") => loop {
                std::thread::sleep(Duration::from_secs(600));
            },
            _ => Ok(()),
        }
    }
}

/// Returns all sockets of this process.
fn open_sockets() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let is_socket = |path: &std::path::Path| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("socket:"))
    };
    entries
        .map(|entry| entry.path())
        .filter(|path| is_socket(path))
        .filter_map(|path| path.file_name()?.to_str()?.parse().ok())
        .collect()
}

#[allow(unsafe_code, reason = "a descriptor that is open as long as the process")]
fn write_to_socket(bytes: &[u8]) -> Result<Bytes, String> {
    let socket = *open_sockets().first().ok_or("there is no socket")?;
    // SAFETY: the descriptor was open a moment ago, and nothing closes it meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(socket) };
    let copy = socket.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    std::fs::File::from(copy).write_all(bytes).map_err(|error| error.to_string())?;
    Ok(Bytes::new())
}

#[allow(unsafe_code, reason = "descriptors that are not used any more")]
fn close_socket() {
    for socket in open_sockets() {
        // SAFETY: the owner never uses it again: this process does nothing afterwards.
        unsafe { libc::close(socket) };
    }
}

#[allow(unsafe_code, reason = "a signal to ourselves")]
fn signal_ourselves(signal: i32) {
    // SAFETY: takes numbers only.
    unsafe { libc::kill(libc::getpid(), signal) };
}

#[allow(unsafe_code, reason = "a signal's disposition")]
fn ignore_interrupts() {
    // SAFETY: ignoring a signal needs no handler.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
}

fn main() {
    gpupool_dispatch::run_helper_if_requested();
    if let Err(error) = serve_tasks::<OddWorker>() {
        eprintln!("odd_worker: {error}");
        std::process::exit(1);
    }
}

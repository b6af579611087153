//! Runs a command as a job that cannot outlive this program, and says what becomes of it, a line each:
//! `prepared PID`, `started PID`, `stopped SIGNAL`, `continued`, `stuck COUNT`, `ended exited CODE`, `ended signalled SIGNAL`.
//!
//! ```text
//! starter [--describe] [--foreground] [--from-a-thread] [--drop-on-input] [--group NAME]
//!         [--host-memory BYTES] -- PROGRAM [ARGUMENT…]
//! ```

use std::io::Read;
use std::process::ExitCode;

use gpupool_confine::cgroup::{CgroupLimits, CgroupManager};
use gpupool_confine::keeper;
use gpupool_confine::spawn::{Job, JobEvent, JobSpec, SpawnError, TerminalUse};

fn main() -> ExitCode {
    keeper::run_helper_if_requested();
    let wishes = Wishes::read();
    if wishes.describe {
        println!("{}", CgroupManager::detect());
        return ExitCode::SUCCESS;
    }
    match run(wishes) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        Err(error) => {
            println!("failed {error}");
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(u8::MAX))
        }
    }
}

#[derive(Default)]
struct Wishes {
    describe: bool,
    foreground: bool,
    from_a_thread: bool,
    drop_on_input: bool,
    group: Option<String>,
    host_memory: Option<u64>,
    command: Vec<String>,
}

impl Wishes {
    fn read() -> Self {
        let mut wishes = Self::default();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--describe" => wishes.describe = true,
                "--foreground" => wishes.foreground = true,
                "--from-a-thread" => wishes.from_a_thread = true,
                "--drop-on-input" => wishes.drop_on_input = true,
                "--group" => wishes.group = arguments.next(),
                "--host-memory" => wishes.host_memory = arguments.next().and_then(|bytes| bytes.parse().ok()),
                "--" => wishes.command = arguments.by_ref().collect(),
                other => panic!("unknown argument {other:?}"),
            }
        }
        wishes
    }
}

fn run(wishes: Wishes) -> Result<i32, SpawnError> {
    let drop_on_input = wishes.drop_on_input;
    let mut job = if wishes.from_a_thread {
        // The thread ends as soon as the job runs; the job must not.
        std::thread::spawn(move || start(&wishes)).join().expect("the starting thread panicked")?
    } else {
        start(&wishes)?
    };
    println!("started {}", job.id().pid);
    if drop_on_input {
        let _ = std::io::stdin().read(&mut [0]);
        drop(job);
        println!("dropped");
        return Ok(0);
    }
    loop {
        match job.next_event()? {
            JobEvent::Stopped(signal) => {
                println!("stopped {signal}");
                job.mirror_stop(signal)?;
            }
            JobEvent::Continued => println!("continued"),
            JobEvent::Ended(end) => {
                println!("stuck {}", job.stuck_processes());
                println!("ended {}", format!("{end:?}").to_lowercase().replace(['(', ')'], " ").trim());
                return Ok(end.exit_code());
            }
        }
    }
}

fn start(wishes: &Wishes) -> Result<Job, SpawnError> {
    let (program, arguments) = wishes.command.split_first().expect("a program after --");
    let terminal = if wishes.foreground { TerminalUse::Foreground } else { TerminalUse::Background };
    let mut prepared = Job::prepare(JobSpec::new(program).args(arguments).terminal(terminal))?;
    println!("prepared {}", prepared.id().pid);
    if let Some(name) = &wishes.group {
        let limits = CgroupLimits { host_memory: wishes.host_memory, pids: None };
        prepared.join_cgroup(CgroupManager::detect().create(name, &limits)?)?;
    }
    prepared.start()
}

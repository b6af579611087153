//! Runs a command as a job that cannot outlive this program, and prints its events, one per line: `prepared PID`,
//! `started PID`, `stopped SIGNAL`, `continued`, `stuck COUNT`, `ended exited CODE`, `ended signalled SIGNAL`.
//!
//! ```text
//! starter [--describe] [--foreground] [--from-a-thread] [--drop-on-input] [--group NAME]
//!         [--host-memory BYTES] -- PROGRAM [ARGUMENT…]
//! ```

use std::io::Read;
use std::process::ExitCode;

use gpupool_confine::cgroup::{CgroupLimits, CgroupManager};
use gpupool_confine::spawn::{Job, JobEvent, JobSpec, SpawnError, TerminalUse};
use gpupool_confine::supervisor;

fn main() -> ExitCode {
    supervisor::run_helper_if_requested();
    let options = StarterOptions::read();
    if options.describe {
        println!("{}", CgroupManager::detect());
        return ExitCode::SUCCESS;
    }
    match run(options) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        Err(error) => {
            println!("failed {error}");
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(u8::MAX))
        }
    }
}

#[derive(Default)]
struct StarterOptions {
    describe: bool,
    foreground: bool,
    from_a_thread: bool,
    drop_on_input: bool,
    group: Option<String>,
    host_memory: Option<u64>,
    command: Vec<String>,
}

impl StarterOptions {
    fn read() -> Self {
        let mut options = Self::default();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--describe" => options.describe = true,
                "--foreground" => options.foreground = true,
                "--from-a-thread" => options.from_a_thread = true,
                "--drop-on-input" => options.drop_on_input = true,
                "--group" => options.group = arguments.next(),
                "--host-memory" => options.host_memory = arguments.next().and_then(|bytes| bytes.parse().ok()),
                "--" => options.command = arguments.by_ref().collect(),
                other => panic!("unknown argument {other:?}"),
            }
        }
        options
    }
}

fn run(options: StarterOptions) -> Result<i32, SpawnError> {
    let drop_on_input = options.drop_on_input;
    let mut job = if options.from_a_thread {
        // The thread ends as soon as the job runs; the job must not.
        std::thread::spawn(move || start(&options)).join().expect("the starting thread panicked")?
    } else {
        start(&options)?
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

fn start(options: &StarterOptions) -> Result<Job, SpawnError> {
    let (program, arguments) = options.command.split_first().expect("a program after --");
    let terminal = if options.foreground { TerminalUse::Foreground } else { TerminalUse::Background };
    let mut prepared = Job::prepare(JobSpec::new(program).args(arguments).terminal(terminal))?;
    println!("prepared {}", prepared.id().pid);
    if let Some(name) = &options.group {
        let limits = CgroupLimits { host_memory: options.host_memory, pids: None };
        prepared.join_cgroup(CgroupManager::detect().create(name, &limits)?)?;
    }
    prepared.start()
}

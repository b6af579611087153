//! What was answered stays, whatever happens to the agent, its disk and the clock; what could not be kept is refused.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, AttachUntil, HolderBody, LeaseState};
use gpupool_testkit::{TestAgent, within_deadline};

use crate::common::child::ClientProcess;
use crate::common::machine::{SmallDisk, Unwritable, WallClock};
use crate::common::{agent, eventually, granted, now, skipped, whole};

#[tokio::test]
async fn what_was_answered_survives_a_kill_right_after_the_answer() {
    let mut agent = agent().argument("--access-log=false").start().await;
    let client = agent.client_unix();
    let mut last_token = 0;
    for round in 0..5 {
        let (lease, token) = granted(&client, &whole()).await;
        agent.restart().await;
        let after = now(&client, lease.id).await;
        assert_eq!((after.state, after.token, &after.devices), (LeaseState::Active, Some(token), &lease.devices));
        assert!(token > last_token, "round {round}: token {token} after {last_token}");
        last_token = token;
        client.release(lease.id).await.unwrap();
        agent.restart().await;
        let over = now(&client, lease.id).await;
        assert_eq!((over.state, over.cause.as_deref()), (LeaseState::Released, Some("by_owner")), "round {round}");
    }
}

#[tokio::test]
async fn told_to_stop_it_answers_who_waits_and_keeps_all_leases() {
    let mut agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let (held, token) = granted(&client, &whole()).await;
    let mut watch = agent.watch_events().await;
    let waiting = RequestBody { wait_secs: Some(60.0), ..RequestBody::default() };
    let asker = client.clone();
    let asked = tokio::spawn(async move { asker.request(&waiting).await });
    let queued = watch.wait_for("the waiter in the queue", |event| event.kind == "queued").await.lease.unwrap();
    let status = agent.stop().await;
    assert!(status.success(), "{status:?}");
    // Either the answer came while it drained, or the client asked the next run under the same key.
    agent.restart().await;
    client.renew(held.id, token).await.unwrap();
    let still = now(&client, queued).await;
    assert_eq!(still.state, LeaseState::Queued);
    client.release(held.id).await.unwrap();
    let lease = within_deadline("the waiter's answer", asked).await.unwrap().unwrap();
    assert_eq!(lease.id, queued);
    let granted = client.follow(queued, Duration::from_secs(30)).await.unwrap();
    assert_eq!(granted.state, LeaseState::Active);
}

#[tokio::test]
async fn a_long_poll_gets_its_answer_when_the_agent_is_told_to_stop() {
    use crate::common::http::{Answer, Place, request};
    let agent = agent().simulate("1xH100").start().await;
    granted(&agent.client(), &whole()).await;
    let mut watch = agent.watch_events().await;
    let mut stream = Place::tcp(&agent).connect().unwrap();
    let body = r#"{"wait_secs":60}"#;
    stream.write_all(request("POST", "/v1/leases", &[("Idempotency-Key", "k")], Some(body)).as_bytes()).unwrap();
    watch.wait_for("the waiter in the queue", |event| event.kind == "queued").await;
    let answer = tokio::task::spawn_blocking(move || Answer::read(&mut stream).unwrap());
    assert!(agent.stop().await.success());
    let answer = within_deadline("the answer", answer).await.unwrap();
    assert_eq!((answer.status, answer.json()["state"].as_str()), (202, Some("queued")), "{}", answer.text());
}

#[tokio::test]
async fn a_second_agent_on_the_same_state_says_who_has_it_and_ends() {
    let agent = agent().start().await;
    let second = serve_once(agent.state_dir());
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains(&format!("in use by process {}", agent.pid())), "{said}");
    assert!(agent.client_unix().pool().await.is_ok());
}

/// Runs an agent that is expected to end by itself.
fn serve_once(state_dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    command.args(["serve", "--simulate", "1xH100", "--port", "0", "--state-dir"]).arg(state_dir).output().unwrap()
}

#[tokio::test]
async fn a_state_that_cannot_be_trusted_is_refused_and_left_as_it_is() {
    let newer = |mut bytes: Vec<u8>| {
        bytes[60..64].copy_from_slice(&99_u32.to_be_bytes());
        bytes
    };
    let foreign = |mut bytes: Vec<u8>| {
        bytes[68..72].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
        bytes
    };
    let torn = |mut bytes: Vec<u8>| {
        for byte in bytes.iter_mut().skip(4096) {
            *byte = 0xa5;
        }
        bytes
    };
    type Spoil = Box<dyn Fn(Vec<u8>) -> Vec<u8>>;
    let cases: [(&str, Spoil); 4] = [
        ("has schema 99", Box::new(newer)),
        ("a database of another program", Box::new(foreign)),
        ("is damaged", Box::new(torn)),
        ("it is not a database", Box::new(|_| b"all my notes\n".repeat(100))),
    ];
    let agent = agent().start().await;
    granted(&agent.client_unix(), &whole()).await;
    assert!(agent.stop().await.success());
    let good = std::fs::read(agent.state_dir().join("pool.db")).unwrap();
    assert!(!agent.state_dir().join("pool.db-wal").exists(), "an agent that ended in order leaves no log");
    for (says, spoil) in cases {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("pool.db"), spoil(good.clone())).unwrap();
        let before = files(folder.path());
        let refused = serve_once(folder.path());
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.contains(says), "{says:?} expected: {said}");
        assert!(said.contains("left untouched") || said.contains("untouched"), "{said}");
        let after = files(folder.path());
        let was_there = |(name, _): &(&String, &Vec<u8>)| before.contains_key(*name);
        let (kept, added): (Vec<_>, Vec<_>) = after.iter().partition(was_there);
        assert!(kept.into_iter().eq(&before), "{says}: the files were changed");
        // Looking into a database may leave a log behind, in which nothing is.
        assert!(added.iter().all(|(name, bytes)| name.ends_with("-shm") || bytes.is_empty()), "{says}: {added:?}");
    }
}

/// Everything but the lock, which is not part of the state.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    named.filter(|(name, _)| name != "lock").map(|(name, path)| (name, std::fs::read(path).unwrap())).collect()
}

#[tokio::test]
async fn a_state_that_cannot_be_written_refuses_wishes_and_recovers() {
    let agent = agent().start().await;
    let client = agent.client_unix();
    let (lease, token) = granted(&client, &whole()).await;
    let unwritable = match Unwritable::make(&agent.state_dir().join("pool.db-wal")) {
        Ok(unwritable) => unwritable,
        Err(why) => return skipped("a state that cannot be written", &why),
    };
    let (status, code) = refused(&agent).await;
    if status == 201 {
        return skipped("a state that cannot be written", "files marked immutable can be written here");
    }
    assert_eq!((status, code.as_str()), (503, "not_durable"));
    let health = client.health().await.unwrap();
    assert_eq!((health.status.as_str(), health.store.as_str()), ("unhealthy", "broken"), "{:?}", health.problems);
    assert_eq!(now_or_listed(&agent, lease.id).await, Some(LeaseState::Active), "reading goes on");
    assert!(client.stats().await.is_ok());
    drop(unwritable);
    eventually("the store to recover", async || (refused(&agent).await.0 == 201).then_some(())).await;
    assert_eq!(client.renew(lease.id, token).await.unwrap().state, LeaseState::Active);
    assert_eq!(client.health().await.unwrap().store, "ok");
}

/// The answer to a request for a tenth, with the code of the problem; what was granted is given back.
async fn refused(agent: &TestAgent) -> (u16, String) {
    let place = crate::common::http::Place::unix(agent);
    let asked = move || {
        let answer = place.post("/v1/leases", &serde_json::json!({"fraction": 0.1, "queue": false}));
        if answer.status == 201 {
            place.ask("DELETE", &format!("/v1/leases/{}", answer.json()["id"]), &[], None);
        }
        (answer.status, answer.code())
    };
    tokio::task::spawn_blocking(asked).await.unwrap()
}

/// The state of a lease as the list of leases tells it.
async fn now_or_listed(agent: &TestAgent, lease: u64) -> Option<LeaseState> {
    let listed = agent.client_unix().leases(&Default::default()).await.unwrap();
    listed.leases.iter().find(|found| found.id == lease).map(|found| found.state)
}

#[tokio::test]
async fn on_a_full_disk_nobody_gets_more_and_everybody_can_give_back() {
    let disk = match SmallDisk::new(6) {
        Ok(disk) => disk,
        Err(why) => return skipped("a full disk", &why),
    };
    let agent = agent().state_dir(disk.path()).start().await;
    let client = agent.client_unix();
    let (kept, token) = granted(&client, &whole()).await;
    let (given_back, _) = granted(&client, &whole()).await;
    let filler = disk.fill();
    // What is in the log already may still take a few rows.
    eventually("the disk to be found full", async || (refused(&agent).await.0 == 503).then_some(())).await;
    assert_eq!(refused(&agent).await.1, "disk_full");
    let health = client.health().await.unwrap();
    assert_eq!((health.status.as_str(), health.store.as_str()), ("degraded", "full"), "{:?}", health.problems);
    assert_eq!(client.renew(kept.id, token).await.unwrap().state, LeaseState::Active, "who holds something goes on");
    assert_eq!(client.release(given_back.id).await.unwrap().unwrap().state, LeaseState::Released);
    assert_eq!(now_or_listed(&agent, kept.id).await, Some(LeaseState::Active));
    std::fs::remove_file(filler).unwrap();
    eventually("the store to recover", async || (refused(&agent).await.0 == 201).then_some(())).await;
    assert_eq!(client.health().await.unwrap().status, "healthy");
    assert_eq!(now(&client, given_back.id).await.state, LeaseState::Released);
}

#[tokio::test]
async fn a_holder_that_went_while_the_agent_was_away_is_found_gone_and_one_that_lives_keeps_its_lease() {
    let mut agent = agent().start().await;
    let (socket, client) = (agent.socket().to_owned(), agent.client_unix());
    let mut holders = [(); 2].map(|()| ClientProcess::start(&socket));
    let held: Vec<(u64, u64)> = holders.iter_mut().map(|holder| holder.holds().unwrap()).collect();
    agent.kill9().await;
    holders[0].kill();
    agent.restart().await;
    let over =
        eventually("the end of the lease", async || Some(now(&client, held[0].0).await).filter(|l| l.state.is_ended()));
    assert_eq!(over.await.cause.as_deref(), Some("holder_gone"));
    let lives = now(&client, held[1].0).await;
    assert_eq!((lives.state, lives.holder), (LeaseState::Active, Some(HolderBody::Process { pid: holders[1].pid() })));
    let mut watch = agent.watch_events().await;
    holders[1].kill();
    watch.wait_for_lease("ended", held[1].0).await;
}

#[tokio::test]
async fn a_lease_held_by_a_connection_has_a_grace_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("gpupool.toml");
    std::fs::write(&config, "[leases]\nhold_grace_secs = 2\n").unwrap();
    let mut agent = agent().argument("--config").argument(&config).start().await;
    let client = agent.client();
    let (returns, token) = granted(&client, &whole()).await;
    let (stays_away, other_token) = granted(&client, &whole()).await;
    let first = client.hold_lease(returns.id, token).await.unwrap();
    let _second = client.hold_lease(stays_away.id, other_token).await.unwrap();
    agent.restart().await;
    drop(first);
    let again = client.hold_lease(returns.id, token).await.unwrap();
    let over = eventually("the end of the grace", async || {
        Some(now(&client, stays_away.id).await).filter(|l| l.state.is_ended())
    });
    over.await;
    let lives = now(&client, returns.id).await;
    assert_eq!((lives.state, lives.holder), (LeaseState::Active, Some(HolderBody::Connection)));
    let mut watch = agent.watch_events().await;
    drop(again);
    let ended = watch.wait_for_lease("ended", returns.id).await;
    assert!(ended.reason.unwrap().contains("connection"), "closing the connection gives the lease back");
}

#[tokio::test]
async fn nobody_but_the_holder_ends_a_lease_by_letting_go() {
    let agent = agent().start().await;
    let mut holder = ClientProcess::start(agent.socket());
    let (lease, token) = holder.holds().unwrap();
    let client = agent.client();
    let stale = client.hold_lease(lease, token + 1).await.unwrap_err();
    assert_eq!(stale.code(), Some("stale"));
    // A commit after it: by then the refused connection has been noticed as closed.
    granted(&client, &whole()).await;
    let lives = now(&client, lease).await;
    assert_eq!((lives.state, lives.holder), (LeaseState::Active, Some(HolderBody::Process { pid: holder.pid() })));
}

#[tokio::test]
async fn a_wall_clock_that_is_set_ends_no_lease_early_and_none_late() {
    let clock = WallClock::new();
    let builder = clock.variables().into_iter().fold(agent(), |agent, (name, value)| agent.variable(name, value));
    let mut agent = builder.start().await;
    let client = agent.client_unix();
    let (long, token) = granted(&client, &RequestBody { ttl_secs: Some(300.0), ..whole() }).await;
    clock.set_ahead(2 * 86_400);
    let mut watch = agent.watch_events().await;
    let (short, _) = granted(&client, &RequestBody { ttl_secs: Some(3.0), ..whole() }).await;
    assert_eq!(now(&client, long.id).await.state, LeaseState::Active);
    clock.set_ahead(-2 * 86_400);
    let ended = watch.wait_for_lease("ended", short.id).await;
    assert!(ended.reason.unwrap().contains("not renewed"));
    assert_eq!(now(&client, long.id).await.state, LeaseState::Active);
    agent.restart().await;
    let (late, _) = granted(&client, &whole()).await;
    let kept = client.renew(long.id, token).await.unwrap();
    assert_eq!(kept.state, LeaseState::Active);
    // The trail is in the order things happened, not in that of the wall clock.
    let records = gpupool_testkit::audit::fetch_all_records(&client).await.unwrap();
    let told: Vec<(u64, &str)> = records.iter().map(|record| (record.lease, record.event.as_str())).collect();
    assert_eq!(told, [(long.id, "granted"), (short.id, "granted"), (short.id, "ended"), (late.id, "granted")]);
    assert!(records[3].at < records[0].at && records[0].at < records[1].at, "the clock was not set: {records:#?}");
}

#[tokio::test]
async fn a_lease_tied_to_its_job_lives_as_long_as_the_job_whoever_else_goes() {
    let mut agent = agent().start().await;
    let client = agent.client_unix();
    let (lease, token) = granted(&client, &whole()).await;
    let mut job = Command::new("sleep").arg("1000").spawn().unwrap();
    let body = AttachBody { token, job_pid: Some(job.id()), until: AttachUntil::Job, ..AttachBody::default() };
    let attached = client.attach(lease.id, &body).await;
    if attached.as_ref().is_err_and(|error| error.code() == Some("no_group")) {
        job.kill().unwrap();
        job.wait().unwrap();
        return skipped("tying a lease to a control group", "none can be made here");
    }
    let holder = attached.unwrap().lease.holder;
    assert!(matches!(holder, Some(HolderBody::Cgroup { .. })), "{holder:?}");
    agent.restart().await;
    assert_eq!(now(&client, lease.id).await.state, LeaseState::Active);
    let mut watch = agent.watch_events().await;
    job.kill().unwrap();
    job.wait().unwrap();
    watch.wait_for_lease("ended", lease.id).await;
    assert_eq!(now(&client, lease.id).await.cause.as_deref(), Some("holder_gone"));
}

#[tokio::test]
async fn a_lease_that_ends_while_its_job_comes_leaves_no_group_and_no_job() {
    let agent = agent().argument("--access-log=false").start().await;
    let client = agent.client_unix();
    // It ends with what it reads from, however this test ends.
    let job = || Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let attach = |token, job: &Child| AttachBody { token, job_pid: Some(job.id()), ..AttachBody::default() };
    let (lease, token) = granted(&client, &whole()).await;
    let Some(first) = client.attach(lease.id, &attach(token, &job())).await.unwrap().cgroup else {
        return skipped("jobs of a lease that ends", "no control group can be made here");
    };
    client.release(lease.id).await.unwrap();
    for round in 0..100 {
        let (lease, token) = granted(&client, &whole()).await;
        let mut job = job();
        let (releasing, id) = (client.clone(), lease.id);
        // The further on, the later the release comes.
        let released = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_micros(20 * round)).await;
            releasing.release(id).await.unwrap();
        });
        let attached = client.attach(lease.id, &attach(token, &job)).await;
        released.await.unwrap();
        match attached {
            Ok(_) => drop(eventually("the job of a lease that is over ends", async || job.try_wait().unwrap()).await),
            Err(error) => assert_eq!(error.code(), Some("ended"), "{error}"),
        }
    }
    // A group is named for its lease: none is left, also of those that were refused.
    let (directory, name) = (Path::new(&first).parent().unwrap(), Path::new(&first).file_name().unwrap());
    let ours = name.to_str().unwrap().rsplit_once('-').unwrap().0;
    let left = || {
        let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with(ours)).count()
    };
    eventually("groups of leases that are over are removed", async || (left() == 0).then_some(())).await;
}

#[tokio::test]
async fn a_node_with_live_leases_cannot_be_renamed() {
    let mut agent = agent().simulate("1xH100").start().await;
    let (lease, _) = granted(&agent.client(), &whole()).await;
    let old = agent.client().pool().await.unwrap().node;
    assert!(agent.stop().await.success());
    let mut renamed = Command::new("timeout");
    renamed.args(["20", env!("CARGO_BIN_EXE_gpupool"), "serve", "--simulate", "1xH100", "--port", "0"]);
    let refused = renamed.args(["--node-name", "renamed", "--state-dir"]).arg(agent.state_dir()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let expected = format!(
        "live leases of node {old:?} ({}), but server.node_name is \"renamed\"; set server.node_name to {old:?}",
        lease.id
    );
    assert!(refused.status.code() == Some(1) && said.contains(&expected), "{said}");
    agent.restart().await;
    assert_eq!(now(&agent.client(), lease.id).await.state, LeaseState::Active);
}

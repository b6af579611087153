//! Every response stays true after faults of the agent, its disk and the clock. Changes that cannot be stored are refused.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use gpupool_api::RequestBody;
use gpupool_api::lease::{AttachBody, AttachUntil, HolderBody, LeaseState};
use gpupool_testkit::{TestAgent, within_deadline};

use crate::common::child::ClientProcess;
use crate::common::machine::{SmallDisk, UnwritableFile, WallClock};
use crate::common::{acquire, agent, eventually, read_lease, skipped, whole_gpu};

#[tokio::test]
async fn a_response_survives_a_kill_right_after_it() {
    let mut agent = agent().argument("--access-log=false").start().await;
    let client = agent.client_unix();
    let mut last_token = 0;
    for round in 0..5 {
        let (lease, token) = acquire(&client, &whole_gpu()).await;
        agent.restart().await;
        let after = read_lease(&client, lease.id).await;
        assert_eq!((after.state, after.token, &after.devices), (LeaseState::Active, Some(token), &lease.devices));
        assert!(token > last_token, "round {round}: token {token} after {last_token}");
        last_token = token;
        client.release(lease.id).await.unwrap();
        agent.restart().await;
        let over = read_lease(&client, lease.id).await;
        assert_eq!((over.state, over.cause.as_deref()), (LeaseState::Released, Some("by_owner")), "round {round}");
    }
}

#[tokio::test]
async fn shutdown_answers_waiting_calls_and_keeps_all_leases() {
    let mut agent = agent().simulate("1xH100").start().await;
    let client = agent.client();
    let (held, token) = acquire(&client, &whole_gpu()).await;
    let mut watch = agent.watch_events().await;
    let waiting = RequestBody { wait_secs: Some(60.0), ..RequestBody::default() };
    let requester = client.clone();
    let call = tokio::spawn(async move { requester.request(&waiting).await });
    let queued = watch.wait_for("the waiter in the queue", |event| event.kind == "queued").await.lease.unwrap();
    let status = agent.stop().await;
    assert!(status.success(), "{status:?}");
    // The response came during the shutdown, or the client repeated the request to the next run with the same key.
    agent.restart().await;
    client.renew(held.id, token).await.unwrap();
    let still = read_lease(&client, queued).await;
    assert_eq!(still.state, LeaseState::Queued);
    client.release(held.id).await.unwrap();
    let lease = within_deadline("the waiter's response", call).await.unwrap().unwrap();
    assert_eq!(lease.id, queued);
    let granted = client.follow(queued, Duration::from_secs(30)).await.unwrap();
    assert_eq!(granted.state, LeaseState::Active);
}

#[tokio::test]
async fn a_long_poll_is_answered_at_shutdown() {
    use crate::common::http::{RawEndpoint, RawResponse, request};
    let agent = agent().simulate("1xH100").start().await;
    acquire(&agent.client(), &whole_gpu()).await;
    let mut watch = agent.watch_events().await;
    let mut stream = RawEndpoint::tcp(&agent).connect().unwrap();
    let body = r#"{"wait_secs":60}"#;
    stream.write_all(request("POST", "/v1/leases", &[("Idempotency-Key", "k")], Some(body)).as_bytes()).unwrap();
    watch.wait_for("the waiter in the queue", |event| event.kind == "queued").await;
    let response = tokio::task::spawn_blocking(move || RawResponse::read(&mut stream).unwrap());
    assert!(agent.stop().await.success());
    let response = within_deadline("the response", response).await.unwrap();
    assert_eq!((response.status, response.json()["state"].as_str()), (202, Some("queued")), "{}", response.text());
}

#[tokio::test]
async fn a_second_agent_on_the_same_state_names_the_first_and_ends() {
    let agent = agent().start().await;
    let second = serve_once(agent.state_dir());
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    let error = String::from_utf8_lossy(&second.stderr);
    assert!(error.contains(&format!("in use by process {}", agent.pid())), "{error}");
    assert!(agent.client_unix().pool().await.is_ok());
}

/// Runs an agent that must end on its own.
fn serve_once(state_dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    command.args(["serve", "--simulate", "1xH100", "--port", "0", "--state-dir"]).arg(state_dir).output().unwrap()
}

#[tokio::test]
async fn a_database_that_cannot_be_trusted_is_refused_and_unchanged() {
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
    type Corruption = Box<dyn Fn(Vec<u8>) -> Vec<u8>>;
    let cases: [(&str, Corruption); 4] = [
        ("has schema 99", Box::new(newer)),
        ("a database of another program", Box::new(foreign)),
        ("is damaged", Box::new(torn)),
        ("it is not a database", Box::new(|_| b"all my notes\n".repeat(100))),
    ];
    let agent = agent().start().await;
    acquire(&agent.client_unix(), &whole_gpu()).await;
    assert!(agent.stop().await.success());
    let good = std::fs::read(agent.state_dir().join("pool.db")).unwrap();
    assert!(!agent.state_dir().join("pool.db-wal").exists(), "an agent that ended in order leaves no log");
    for (message, corrupt) in cases {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("pool.db"), corrupt(good.clone())).unwrap();
        let before = read_files(folder.path());
        let refused = serve_once(folder.path());
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(1) && error.contains(message), "{message:?} expected: {error}");
        assert!(error.contains("untouched"), "{error}");
        let after = read_files(folder.path());
        let was_there = |(name, _): &(&String, &Vec<u8>)| before.contains_key(*name);
        let (existing, added): (Vec<_>, Vec<_>) = after.iter().partition(was_there);
        assert!(existing.into_iter().eq(&before), "{message}: the files were changed");
        // Opening a database may leave an empty log.
        assert!(added.iter().all(|(name, bytes)| name.ends_with("-shm") || bytes.is_empty()), "{message}: {added:?}");
    }
}

/// Returns the content of every file but the lock, which is not part of the state.
fn read_files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    named.filter(|(name, _)| name != "lock").map(|(name, path)| (name, std::fs::read(path).unwrap())).collect()
}

#[tokio::test]
async fn with_an_unwritable_database_requests_are_refused_until_it_recovers() {
    let agent = agent().start().await;
    let client = agent.client_unix();
    let (lease, token) = acquire(&client, &whole_gpu()).await;
    let unwritable = match UnwritableFile::make(&agent.state_dir().join("pool.db-wal")) {
        Ok(unwritable) => unwritable,
        Err(why) => return skipped("an unwritable database", &why),
    };
    let (status, code) = try_request(&agent).await;
    if status == 201 {
        return skipped("an unwritable database", "immutable files are writable here");
    }
    assert_eq!((status, code.as_str()), (503, "not_durable"));
    let health = client.health().await.unwrap();
    assert_eq!((health.status.as_str(), health.store.as_str()), ("unhealthy", "broken"), "{:?}", health.problems);
    assert_eq!(listed_state(&agent, lease.id).await, Some(LeaseState::Active), "leases can still be read");
    assert!(client.stats().await.is_ok());
    drop(unwritable);
    eventually("the store to recover", async || (try_request(&agent).await.0 == 201).then_some(())).await;
    assert_eq!(client.renew(lease.id, token).await.unwrap().state, LeaseState::Active);
    assert_eq!(client.health().await.unwrap().store, "ok");
}

/// Requests a tenth of a GPU, releases it if it was granted, and returns the status and the code of the problem.
async fn try_request(agent: &TestAgent) -> (u16, String) {
    let endpoint = crate::common::http::RawEndpoint::unix(agent);
    let send = move || {
        let response = endpoint.post("/v1/leases", &serde_json::json!({"fraction": 0.1, "queue": false}));
        if response.status == 201 {
            endpoint.send("DELETE", &format!("/v1/leases/{}", response.json()["id"]), &[], None);
        }
        (response.status, response.code())
    };
    tokio::task::spawn_blocking(send).await.unwrap()
}

/// Returns the state of a lease from the list of leases.
async fn listed_state(agent: &TestAgent, lease: u64) -> Option<LeaseState> {
    let listed = agent.client_unix().leases(&Default::default()).await.unwrap();
    listed.leases.iter().find(|found| found.id == lease).map(|found| found.state)
}

#[tokio::test]
async fn on_a_full_disk_leases_can_only_be_renewed_and_released() {
    let disk = match SmallDisk::new(6) {
        Ok(disk) => disk,
        Err(why) => return skipped("a full disk", &why),
    };
    let agent = agent().state_dir(disk.path()).start().await;
    let client = agent.client_unix();
    let (held, token) = acquire(&client, &whole_gpu()).await;
    let (released, _) = acquire(&client, &whole_gpu()).await;
    let filler = disk.fill();
    // The log may still have room for a few rows.
    eventually("the full disk to be noticed", async || (try_request(&agent).await.0 == 503).then_some(())).await;
    assert_eq!(try_request(&agent).await.1, "disk_full");
    let health = client.health().await.unwrap();
    assert_eq!((health.status.as_str(), health.store.as_str()), ("degraded", "full"), "{:?}", health.problems);
    assert_eq!(client.renew(held.id, token).await.unwrap().state, LeaseState::Active, "a lease can still be renewed");
    assert_eq!(client.release(released.id).await.unwrap().unwrap().state, LeaseState::Released);
    assert_eq!(listed_state(&agent, held.id).await, Some(LeaseState::Active));
    std::fs::remove_file(filler).unwrap();
    eventually("the store to recover", async || (try_request(&agent).await.0 == 201).then_some(())).await;
    assert_eq!(client.health().await.unwrap().status, "healthy");
    assert_eq!(read_lease(&client, released.id).await.state, LeaseState::Released);
}

#[tokio::test]
async fn after_a_restart_only_leases_of_living_holders_continue() {
    let mut agent = agent().start().await;
    let (socket, client) = (agent.socket().to_owned(), agent.client_unix());
    let mut holders = [(); 2].map(|()| ClientProcess::start(&socket));
    let held: Vec<(u64, u64)> = holders.iter_mut().map(|holder| holder.wait_for_lease().unwrap()).collect();
    agent.kill9().await;
    holders[0].kill();
    agent.restart().await;
    let over = eventually("the end of the lease", async || {
        Some(read_lease(&client, held[0].0).await).filter(|l| l.state.is_ended())
    });
    assert_eq!(over.await.cause.as_deref(), Some("holder_gone"));
    let alive = read_lease(&client, held[1].0).await;
    assert_eq!(
        (alive.state, alive.holder),
        (LeaseState::Active, Some(HolderBody::Process { pid: Some(holders[1].pid()) }))
    );
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
    let (returns, token) = acquire(&client, &whole_gpu()).await;
    let (abandoned, other_token) = acquire(&client, &whole_gpu()).await;
    let first = client.hold_lease(returns.id, token).await.unwrap();
    let _second = client.hold_lease(abandoned.id, other_token).await.unwrap();
    agent.restart().await;
    drop(first);
    let again = client.hold_lease(returns.id, token).await.unwrap();
    let over = eventually("the end of the grace", async || {
        Some(read_lease(&client, abandoned.id).await).filter(|l| l.state.is_ended())
    });
    over.await;
    let alive = read_lease(&client, returns.id).await;
    assert_eq!((alive.state, alive.holder), (LeaseState::Active, Some(HolderBody::Connection)));
    let mut watch = agent.watch_events().await;
    drop(again);
    let ended = watch.wait_for_lease("ended", returns.id).await;
    assert!(ended.reason.unwrap().contains("connection"), "closing the connection releases the lease");
}

#[tokio::test]
async fn a_refused_holder_does_not_end_the_lease() {
    let agent = agent().start().await;
    let mut holder = ClientProcess::start(agent.socket());
    let (lease, token) = holder.wait_for_lease().unwrap();
    let client = agent.client();
    let stale = client.hold_lease(lease, token + 1).await.unwrap_err();
    assert_eq!(stale.code(), Some("stale"));
    let held = client.hold_lease(lease, token).await.unwrap_err();
    assert_eq!(held.code(), Some("held"), "{held}");
    let other = agent.client_unix().attach(lease, &AttachBody { token, ..AttachBody::default() }).await.unwrap_err();
    assert_eq!(other.code(), Some("held"), "{other}");
    // After this commit the agent has noticed that the refused connection is closed.
    acquire(&client, &whole_gpu()).await;
    let alive = read_lease(&client, lease).await;
    assert_eq!(
        (alive.state, alive.holder),
        (LeaseState::Active, Some(HolderBody::Process { pid: Some(holder.pid()) }))
    );
}

#[tokio::test]
async fn setting_the_wall_clock_ends_no_lease_early_or_late() {
    let clock = WallClock::new();
    let builder = clock.variables().into_iter().fold(agent(), |agent, (name, value)| agent.variable(name, value));
    let mut agent = builder.start().await;
    let client = agent.client_unix();
    let (long, token) = acquire(&client, &RequestBody { ttl_secs: Some(300.0), ..whole_gpu() }).await;
    clock.set_ahead(2 * 86_400);
    let mut watch = agent.watch_events().await;
    let (short, _) = acquire(&client, &RequestBody { ttl_secs: Some(3.0), ..whole_gpu() }).await;
    assert_eq!(read_lease(&client, long.id).await.state, LeaseState::Active);
    clock.set_ahead(-2 * 86_400);
    let ended = watch.wait_for_lease("ended", short.id).await;
    assert!(ended.reason.unwrap().contains("not renewed"));
    assert_eq!(read_lease(&client, long.id).await.state, LeaseState::Active);
    agent.restart().await;
    let (late, _) = acquire(&client, &whole_gpu()).await;
    let renewed = client.renew(long.id, token).await.unwrap();
    assert_eq!(renewed.state, LeaseState::Active);
    // The trail is in the order of the commits, not of the wall clock.
    let records = gpupool_testkit::audit::fetch_all_records(&client).await.unwrap();
    let order: Vec<(u64, &str)> = records.iter().map(|record| (record.lease, record.event.as_str())).collect();
    assert_eq!(order, [(long.id, "granted"), (short.id, "granted"), (short.id, "ended"), (late.id, "granted")]);
    assert!(records[3].at < records[0].at && records[0].at < records[1].at, "the clock was not set: {records:#?}");
}

#[tokio::test]
async fn a_lease_attached_to_its_job_lives_as_long_as_the_job() {
    let mut agent = agent().start().await;
    let client = agent.client_unix();
    let (lease, token) = acquire(&client, &whole_gpu()).await;
    let mut job = Command::new("sleep").arg("1000").spawn().unwrap();
    let body = AttachBody { token, job_pid: Some(job.id()), until: AttachUntil::Job, ..AttachBody::default() };
    let attached = client.attach(lease.id, &body).await;
    if attached.as_ref().is_err_and(|error| error.code() == Some("no_group")) {
        job.kill().unwrap();
        job.wait().unwrap();
        return skipped("attaching a lease to a control group", "no control group can be created here");
    }
    let holder = attached.unwrap().lease.holder;
    assert!(matches!(holder, Some(HolderBody::Cgroup { .. })), "{holder:?}");
    agent.restart().await;
    assert_eq!(read_lease(&client, lease.id).await.state, LeaseState::Active);
    let mut watch = agent.watch_events().await;
    job.kill().unwrap();
    job.wait().unwrap();
    watch.wait_for_lease("ended", lease.id).await;
    assert_eq!(read_lease(&client, lease.id).await.cause.as_deref(), Some("holder_gone"));
}

#[tokio::test]
async fn a_lease_that_ends_during_attach_leaves_no_group_and_no_job() {
    let agent = agent().argument("--access-log=false").start().await;
    let client = agent.client_unix();
    // The job ends when its input closes, so also when the test fails.
    let job = || Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let attach = |token, job: &Child| AttachBody { token, job_pid: Some(job.id()), ..AttachBody::default() };
    let (lease, token) = acquire(&client, &whole_gpu()).await;
    let Some(first) = client.attach(lease.id, &attach(token, &job())).await.unwrap().cgroup else {
        return skipped("jobs of a lease that ends", "no control group can be created here");
    };
    client.release(lease.id).await.unwrap();
    for round in 0..100 {
        let (lease, token) = acquire(&client, &whole_gpu()).await;
        let mut job = job();
        let (releasing, id) = (client.clone(), lease.id);
        // Each round releases later.
        let released = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_micros(20 * round)).await;
            releasing.release(id).await.unwrap();
        });
        let attached = client.attach(lease.id, &attach(token, &job)).await;
        released.await.unwrap();
        match attached {
            Ok(_) => drop(eventually("the job of an ended lease to end", async || job.try_wait().unwrap()).await),
            Err(error) => assert_eq!(error.code(), Some("ended"), "{error}"),
        }
    }
    // Groups are named after their leases. None remains, including those of refused attachments.
    let (directory, name) = (Path::new(&first).parent().unwrap(), Path::new(&first).file_name().unwrap());
    let prefix = name.to_str().unwrap().rsplit_once('-').unwrap().0;
    let left = || {
        let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with(prefix)).count()
    };
    eventually("the groups of ended leases to be removed", async || (left() == 0).then_some(())).await;
}

#[tokio::test]
async fn a_node_with_live_leases_cannot_be_renamed() {
    let mut agent = agent().simulate("1xH100").start().await;
    let (lease, _) = acquire(&agent.client(), &whole_gpu()).await;
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
    assert_eq!(read_lease(&agent.client(), lease.id).await.state, LeaseState::Active);
}

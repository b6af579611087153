use super::*;

/// Creates a record of a lease: event, token, and thousandths and MiB of GPU 0.
fn record(event: &str, lease: u64, token: Option<u64>, fraction: f64, memory_mib: u64) -> HistoryRecord {
    let device = HistoryDevice { node: "n".into(), gpu_id: 0, uuid: "GPU-0".into(), fraction, memory_mib };
    HistoryRecord {
        lease,
        event: event.into(),
        at: String::new(),
        owner: "alice".into(),
        worker_id: None,
        devices: if token.is_some() { vec![device] } else { Vec::new() },
        token,
        cause: None,
        reason: None,
        granted_at: None,
        ended_at: None,
    }
}

fn granted(lease: u64, token: u64, fraction: f64) -> HistoryRecord {
    record("granted", lease, Some(token), fraction, (fraction * 500.0) as u64)
}

fn ended(lease: u64, token: u64, fraction: f64) -> HistoryRecord {
    HistoryRecord { event: "ended".into(), ..granted(lease, token, fraction) }
}

/// Builds an audit with one record per second, in this order, unless a record has a time of its own; newest first.
fn audit_of(records: impl IntoIterator<Item = HistoryRecord>, active: &[u64]) -> TrailAudit {
    let timed = |(second, record): (usize, HistoryRecord)| match record.at.as_str() {
        "" => HistoryRecord { at: format!("2026-01-31T08:{:02}:{:02}.000+00:00", second / 60, second % 60), ..record },
        _ => record,
    };
    let mut records: Vec<HistoryRecord> = records.into_iter().enumerate().map(timed).collect();
    records.reverse();
    TrailAudit { records, memory_mib: [("GPU-0".to_owned(), 1000)].into(), active: active.iter().copied().collect() }
}

fn violation_texts(audit: &TrailAudit, observed: &ClientObservations) -> Vec<String> {
    audit.violations(observed).iter().map(ToString::to_string).collect()
}

/// Asserts that there is exactly one violation, with this text.
fn assert_violation(records: impl IntoIterator<Item = HistoryRecord>, active: &[u64], says: &str) {
    let found = violation_texts(&audit_of(records, active), &ClientObservations::default());
    assert!(found.len() == 1 && found[0].contains(says), "{says:?} expected, found {found:#?}");
}

#[test]
fn a_valid_history_has_no_violation() {
    let tenths = (0..10).map(|i| granted(i, i + 1, 0.1));
    let ends = (0..10).map(|i| ended(i, i + 1, 0.1));
    let after = [granted(10, 11, 1.0), record("ended", 11, None, 0.0, 0), ended(10, 11, 1.0), granted(12, 12, 0.5)];
    let audit = audit_of(tenths.chain(ends).chain(after), &[12]);
    let keyed = vec![("k".to_owned(), 3), ("k".to_owned(), 3), ("l".to_owned(), 12)];
    let observed = ClientObservations { granted: vec![(3, 4), (12, 12)], released: vec![3, 11], keyed };
    assert_eq!(violation_texts(&audit, &observed), Vec::<String>::new());
    audit.assert_clean(&observed);
}

#[test]
fn an_overcommitted_device_is_a_violation() {
    assert_violation(
        [granted(1, 1, 0.6), granted(2, 2, 0.401)],
        &[1, 2],
        "lease 2 made GPU 0 promised to 1001 thousandths",
    );
    assert_violation([granted(1, 1, 1.0), record("granted", 2, Some(2), 0.001, 0)], &[1, 2], "1001 thousandths");
    let greedy = [granted(1, 1, 0.5), record("granted", 2, Some(2), 0.1, 751)];
    assert_violation(greedy, &[1, 2], "promised to 1001 of 1000 MiB");
}

#[test]
fn a_temporary_overcommitment_is_a_violation() {
    assert_violation([granted(1, 1, 0.6), granted(2, 2, 0.6), ended(1, 1, 0.6)], &[2], "1200 thousandths");
}

#[test]
fn repeated_or_decreasing_tokens_are_violations() {
    assert_violation([granted(1, 5, 0.1), granted(2, 5, 0.1)], &[1, 2], "got token 5 after token 5");
    assert_violation([granted(1, 5, 0.1), granted(2, 4, 0.1)], &[1, 2], "got token 4 after token 5");
    assert_violation([record("granted", 1, None, 0.1, 0)], &[1], "without a token");
}

#[test]
fn a_lease_that_is_granted_or_ends_twice_is_a_violation() {
    assert_violation([granted(1, 1, 0.1), granted(1, 2, 0.1)], &[1], "granted twice");
    assert_violation([granted(1, 1, 0.1), ended(1, 1, 0.1), granted(1, 2, 0.1)], &[1], "granted after its end");
    assert_violation([granted(1, 1, 0.1), ended(1, 1, 0.1), ended(1, 1, 0.1)], &[], "ended twice");
    assert_violation([ended(1, 1, 0.1)], &[], "never granted");
}

#[test]
fn an_end_that_does_not_match_its_grant_is_a_violation() {
    assert_violation([granted(1, 1, 0.1), ended(1, 2, 0.1)], &[], "ended with Some(2)");
    assert_violation([granted(1, 1, 0.1), ended(1, 1, 0.2)], &[], "other devices");
    assert_violation([HistoryRecord { event: "moved".into(), ..granted(1, 1, 0.1) }], &[], "unknown event");
}

#[test]
fn a_lease_lost_or_invented_by_a_restart_is_a_violation() {
    assert_violation([granted(1, 1, 0.1)], &[], "lease 1 was lost");
    assert_violation([], &[1], "lease 1 is active and not granted");
}

#[test]
fn client_observations_must_match_the_trail() {
    let trail = audit_of([granted(1, 1, 0.1)], &[1]);
    let forgotten =
        violation_texts(&trail, &ClientObservations { granted: vec![(2, 2)], ..ClientObservations::default() });
    assert!(forgotten.len() == 1 && forgotten[0].contains("lease 2"), "{forgotten:?}");
    let other_token =
        violation_texts(&trail, &ClientObservations { granted: vec![(1, 7)], ..ClientObservations::default() });
    assert!(other_token.len() == 1 && other_token[0].contains("token 7"), "{other_token:?}");
    let revived = violation_texts(&trail, &ClientObservations { released: vec![1], ..ClientObservations::default() });
    assert!(revived.len() == 1 && revived[0].contains("released and is still held"), "{revived:?}");
    let keyed = vec![("k".to_owned(), 1), ("k".to_owned(), 2)];
    let twice = violation_texts(&trail, &ClientObservations { keyed, ..ClientObservations::default() });
    assert!(twice.len() == 1 && twice[0].contains("lease 1 and lease 2"), "{twice:?}");
}

#[test]
fn within_a_millisecond_ends_count_first() {
    let now = |record: HistoryRecord| HistoryRecord { at: "2026-01-31T09:00:00.001+00:00".into(), ..record };
    let handed_on = [
        granted(1, 1, 1.0),
        now(ended(1, 1, 1.0)),
        now(granted(2, 2, 1.0)),
        now(ended(2, 2, 1.0)),
        now(granted(3, 3, 1.0)),
    ];
    assert_eq!(
        violation_texts(&audit_of(handed_on.clone(), &[3]), &ClientObservations::default()),
        Vec::<String>::new()
    );
    let too_much = handed_on.into_iter().chain([now(granted(4, 4, 0.001))]);
    assert_violation(too_much, &[3, 4], "lease 4 made GPU 0 promised to 1001 thousandths");
}

#[test]
fn a_record_without_a_valid_time_is_a_violation() {
    let timeless = HistoryRecord { at: "yesterday".into(), ..granted(1, 1, 0.1) };
    assert_violation([timeless], &[], "no valid time");
}

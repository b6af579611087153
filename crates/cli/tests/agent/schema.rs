//! Every route of `/v1` and of the statistics answers as `/openapi.json` says.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::common::agent;
use crate::common::http::{RawEndpoint, RawResponse};
use crate::common::schema::Document;

/// Asks, and notes what was asked and what is wrong with the answers.
struct Checked {
    endpoint: RawEndpoint,
    document: Document,
    asked: BTreeSet<(String, String)>,
    complaints: Vec<String>,
}

impl Checked {
    fn ask(&mut self, method: &str, route: &str, path: &str, body: Option<Value>) -> RawResponse {
        let text = body.map(|body| body.to_string());
        let answer = self.endpoint.send(method, path, &[], text.as_deref());
        self.take(method, route, path, &answer);
        answer
    }

    fn take(&mut self, method: &str, route: &str, path: &str, answer: &RawResponse) {
        let media = answer.header("content-type").unwrap_or("");
        let body = serde_json::from_slice(&answer.body).unwrap_or_else(|_| json!(answer.text()));
        let body = if answer.status == 204 { Value::Null } else { body };
        let found = self.document.complaints(method, route, answer.status, media, &body);
        self.complaints.extend(found.into_iter().map(|what| format!("{method} {path} → {}: {what}", answer.status)));
        self.asked.insert((method.to_owned(), route.to_owned()));
    }

    /// Asks a route of one lease, or of something else with a number.
    fn of(&mut self, method: &str, route: &str, number: &Value, body: Option<Value>, status: u16) -> RawResponse {
        let path = route.replace("{id}", &number.to_string()).replace("{gpu_id}", &number.to_string());
        let answer = self.ask(method, route, &path, body);
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
        answer
    }
}

#[tokio::test]
async fn every_route_answers_as_it_is_documented() {
    let agent = agent().simulate("2xH100,1xMI300X").start().await;
    let endpoint = RawEndpoint::unix(&agent);
    let document = Document(endpoint.get("/openapi.json").json());
    assert!(document.0["openapi"].as_str().unwrap().starts_with("3.1"));
    let mut all = Checked { endpoint, document, asked: BTreeSet::new(), complaints: Vec::new() };

    let lease =
        all.of("POST", "/v1/leases", &Value::Null, Some(json!({"fraction": 0.5, "labels": {"a": "b"}})), 201).json();
    let (id, token) = (lease["id"].clone(), json!({"token": lease["token"]}));
    let queued = all.of("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": 3})), 202).json();
    all.of("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": 3, "queue": false})), 409);
    all.of("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": 9})), 422);
    all.of("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": "x"})), 422);
    all.of("GET", "/v1/leases/{id}", &id, None, 200);
    all.of("GET", "/v1/leases/{id}", &queued["id"], None, 200);
    all.of("GET", "/v1/leases/{id}", &json!(999), None, 404);
    let many = json!({"leases": [id, queued["id"], 999]});
    all.of("POST", "/v1/leases/follow", &Value::Null, Some(many), 200);
    all.of("POST", "/v1/leases/follow", &Value::Null, Some(json!({"leases": []})), 422);
    all.of("POST", "/v1/leases/{id}/renew", &id, Some(token.clone()), 200);
    all.of("POST", "/v1/leases/{id}/renew", &id, Some(json!({"token": 999})), 409);
    all.of("POST", "/v1/leases/{id}/confirm", &id, Some(token.clone()), 200);
    all.of("POST", "/v1/leases/{id}/attach", &id, Some(token.clone()), 200);
    hold(&mut all, &id, &lease["token"]);
    all.of("DELETE", "/v1/leases/{id}", &queued["id"], None, 200);
    all.of("POST", "/v1/devices/{gpu_id}/cordon", &json!(0), None, 200);
    all.of("POST", "/v1/devices/{gpu_id}/uncordon", &json!(0), None, 200);
    all.of("POST", "/v1/devices/{gpu_id}/uncordon", &json!(77), None, 404);
    let made = all.of("POST", "/v1/tokens", &Value::Null, Some(json!({"owner": "alice"})), 201).json();
    all.of("GET", "/v1/tokens", &Value::Null, None, 200);
    all.of("DELETE", "/v1/tokens/{id}", &made["id"], None, 204);
    all.of("POST", "/v1/simulate/faults", &Value::Null, Some(json!({"gpu_id": 0, "fault": "hot:97"})), 200);
    all.of("POST", "/v1/simulate/faults", &Value::Null, Some(json!({"gpu_id": 0, "fault": "bored"})), 422);
    let other = all.of("POST", "/v1/leases", &Value::Null, Some(json!({"fraction": 0.5, "queue": false})), 201).json();
    all.of("POST", "/v1/leases/{id}/revoke", &other["id"], Some(json!({"grace_secs": 5})), 200);
    all.of("POST", "/v1/leases/{id}/revoke", &other["id"], None, 200);
    all.of("POST", "/v1/leases/{id}/revoke", &other["id"], None, 409);
    // Whatever can be asked without a number, now that there is something to tell.
    let plain = |(method, route): &(String, String)| method == "GET" && !route.contains('{') && route != "/v1/events";
    for (method, route) in all.document.operations().iter().filter(|operation| plain(operation)) {
        let answer = all.ask(method, route, route, None);
        assert_eq!(answer.status, 200, "{route}: {}", answer.text());
    }
    for wrong in ["/v1/leases?limit=0", "/v1/leases?state=bored", "/v1/history?since=yesterday", "/v1/usage?by=moon"] {
        let answer = all.ask("GET", wrong.split('?').next().unwrap(), wrong, None);
        assert_eq!((answer.status, answer.code().as_str()), (422, "invalid"), "{wrong}");
    }

    assert!(all.complaints.is_empty(), "{:#?}", all.complaints);
    let streams = [("GET".to_owned(), "/v1/events".to_owned())];
    let documented: BTreeSet<_> = all.document.operations().into_iter().collect();
    let untried: Vec<_> = documented.difference(&all.asked).filter(|operation| !streams.contains(operation)).collect();
    assert!(untried.is_empty(), "documented and not tried: {untried:?}");
}

/// The first line of a stream that does not end.
fn hold(all: &mut Checked, id: &Value, token: &Value) {
    use std::io::{BufRead, BufReader, Write};
    let mut stream = all.endpoint.connect().unwrap();
    let path = format!("/v1/leases/{id}/hold?token={token}");
    stream.write_all(crate::common::http::request("GET", &path, &[], None).as_bytes()).unwrap();
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let line = lines.into_iter().find(|line| line.starts_with('{')).unwrap();
    let headers = vec![("content-type".to_owned(), "application/x-ndjson".to_owned())];
    all.take("GET", "/v1/leases/{id}/hold", &path, &RawResponse { status: 200, headers, body: line.into_bytes() });
}

//! Every response of `/v1` and of the statistics routes conforms to `/openapi.json`.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::common::agent;
use crate::common::http::{RawEndpoint, RawResponse};
use crate::common::schema::OpenApiDocument;

/// A client that checks each response against the OpenAPI document.
struct ConformanceClient {
    endpoint: RawEndpoint,
    document: OpenApiDocument,
    tried: BTreeSet<(String, String)>,
    differences: Vec<String>,
}

impl ConformanceClient {
    fn send(&mut self, method: &str, route: &str, path: &str, body: Option<Value>) -> RawResponse {
        let text = body.map(|body| body.to_string());
        let response = self.endpoint.send(method, path, &[], text.as_deref());
        self.check(method, route, path, &response);
        response
    }

    fn check(&mut self, method: &str, route: &str, path: &str, response: &RawResponse) {
        let media = response.header("content-type").unwrap_or("");
        let body = serde_json::from_slice(&response.body).unwrap_or_else(|_| json!(response.text()));
        let body = if response.status == 204 { Value::Null } else { body };
        let found = self.document.differences(method, route, response.status, media, &body);
        self.differences.extend(found.into_iter().map(|what| format!("{method} {path} → {}: {what}", response.status)));
        self.tried.insert((method.to_owned(), route.to_owned()));
    }

    /// Sends a request to a route, with a number in its path, and checks the status.
    fn send_numbered(
        &mut self,
        method: &str,
        route: &str,
        number: &Value,
        body: Option<Value>,
        status: u16,
    ) -> RawResponse {
        let path = route.replace("{id}", &number.to_string()).replace("{gpu_id}", &number.to_string());
        let response = self.send(method, route, &path, body);
        assert_eq!(response.status, status, "{method} {path}: {}", response.text());
        response
    }
}

#[tokio::test]
async fn every_route_responds_as_documented() {
    let agent = agent().simulate("2xH100,1xMI300X").start().await;
    let endpoint = RawEndpoint::unix(&agent);
    let document = OpenApiDocument(endpoint.get("/openapi.json").json());
    assert!(document.0["openapi"].as_str().unwrap().starts_with("3.1"));
    let mut all = ConformanceClient { endpoint, document, tried: BTreeSet::new(), differences: Vec::new() };

    let lease = all
        .send_numbered("POST", "/v1/leases", &Value::Null, Some(json!({"fraction": 0.5, "labels": {"a": "b"}})), 201)
        .json();
    let (id, token) = (lease["id"].clone(), json!({"token": lease["token"]}));
    let held = all.send_numbered("POST", "/v1/leases", &Value::Null, Some(json!({"fraction": 0.5})), 201).json();
    let queued = all.send_numbered("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": 3})), 202).json();
    all.send_numbered("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": 3, "queue": false})), 409);
    all.send_numbered("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": 9})), 422);
    all.send_numbered("POST", "/v1/leases", &Value::Null, Some(json!({"gpus": "x"})), 422);
    all.send_numbered("GET", "/v1/leases/{id}", &id, None, 200);
    all.send_numbered("GET", "/v1/leases/{id}", &queued["id"], None, 200);
    all.send_numbered("GET", "/v1/leases/{id}", &json!(999), None, 404);
    let many = json!({"leases": [id, queued["id"], 999]});
    all.send_numbered("POST", "/v1/leases/follow", &Value::Null, Some(many), 200);
    all.send_numbered("POST", "/v1/leases/follow", &Value::Null, Some(json!({"leases": []})), 422);
    all.send_numbered("POST", "/v1/leases/{id}/renew", &id, Some(token.clone()), 200);
    all.send_numbered("POST", "/v1/leases/{id}/renew", &id, Some(json!({"token": 999})), 409);
    all.send_numbered("POST", "/v1/leases/{id}/confirm", &id, Some(token.clone()), 200);
    all.send_numbered("POST", "/v1/leases/{id}/attach", &id, Some(token.clone()), 200);
    all.send_numbered("POST", "/v1/leases/{id}/hold", &id, Some(token.clone()), 409);
    check_hold(&mut all, &held["id"], &held["token"]);
    all.send_numbered("DELETE", "/v1/leases/{id}", &queued["id"], None, 200);
    all.send_numbered("POST", "/v1/devices/{gpu_id}/cordon", &json!(0), None, 200);
    all.send_numbered("POST", "/v1/devices/{gpu_id}/uncordon", &json!(0), None, 200);
    all.send_numbered("POST", "/v1/devices/{gpu_id}/uncordon", &json!(77), None, 404);
    all.send_numbered("DELETE", "/v1/devices/{gpu_id}", &json!(0), None, 409);
    all.send_numbered("DELETE", "/v1/devices/{gpu_id}", &json!(77), None, 404);
    let made = all.send_numbered("POST", "/v1/tokens", &Value::Null, Some(json!({"owner": "alice"})), 201).json();
    all.send_numbered("GET", "/v1/tokens", &Value::Null, None, 200);
    all.send_numbered("DELETE", "/v1/tokens/{id}", &made["id"], None, 204);
    all.send_numbered("POST", "/v1/simulate/faults", &Value::Null, Some(json!({"gpu_id": 0, "fault": "hot:97"})), 200);
    all.send_numbered("POST", "/v1/simulate/faults", &Value::Null, Some(json!({"gpu_id": 0, "fault": "bored"})), 422);
    let other = all
        .send_numbered("POST", "/v1/leases", &Value::Null, Some(json!({"fraction": 0.5, "queue": false})), 201)
        .json();
    all.send_numbered("POST", "/v1/leases/{id}/revoke", &other["id"], Some(json!({"grace_secs": 5})), 200);
    all.send_numbered("POST", "/v1/leases/{id}/revoke", &other["id"], None, 200);
    all.send_numbered("POST", "/v1/leases/{id}/revoke", &other["id"], None, 409);
    // Every GET route without a number.
    let plain = |(method, route): &(String, String)| method == "GET" && !route.contains('{') && route != "/v1/events";
    for (method, route) in all.document.operations().iter().filter(|operation| plain(operation)) {
        let response = all.send(method, route, route, None);
        assert_eq!(response.status, 200, "{route}: {}", response.text());
    }
    for wrong in ["/v1/leases?limit=0", "/v1/leases?state=bored", "/v1/history?since=yesterday", "/v1/usage?by=moon"] {
        let response = all.send("GET", wrong.split('?').next().unwrap(), wrong, None);
        assert_eq!((response.status, response.code().as_str()), (422, "invalid"), "{wrong}");
    }

    assert!(all.differences.is_empty(), "{:#?}", all.differences);
    let streams = [("GET".to_owned(), "/v1/events".to_owned())];
    let documented: BTreeSet<_> = all.document.operations().into_iter().collect();
    let untried: Vec<_> = documented.difference(&all.tried).filter(|operation| !streams.contains(operation)).collect();
    assert!(untried.is_empty(), "documented and not tried: {untried:?}");
}

/// Checks the first line of the stream that holds a lease.
fn check_hold(all: &mut ConformanceClient, id: &Value, token: &Value) {
    use std::io::{BufRead, BufReader, Write};
    let mut stream = all.endpoint.connect().unwrap();
    let path = format!("/v1/leases/{id}/hold");
    let body = json!({"token": token}).to_string();
    stream.write_all(crate::common::http::request("POST", &path, &[], Some(&body)).as_bytes()).unwrap();
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let line = lines.into_iter().find(|line| line.starts_with('{')).unwrap();
    let headers = vec![("content-type".to_owned(), "application/x-ndjson".to_owned())];
    all.check("POST", "/v1/leases/{id}/hold", &path, &RawResponse { status: 200, headers, body: line.into_bytes() });
}

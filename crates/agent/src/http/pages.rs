//! Pages for browsers: the front page, and the documentation of the routes.
//!
//! A page may load only what this agent serves, which the browser enforces by the page's content security policy. The
//! pages therefore work without any network, and no other server learns of their use. Large scripts are stored
//! compressed in the binary and sent as they are.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use gpupool_api::stats::RootBody;
use gpupool_config::settings::ApiSettings;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{OpenApi, Server};

use crate::error::AgentError;

use super::SharedState;

/// The word in the front page that is replaced by a nonce, which lets its own script and style run.
const NONCE: &str = "NONCE";

/// Routes of the agent
///
/// A list of routes for programs, a page for browsers (`Accept: text/html`).
#[utoipa::path(
    get, path = "/", tag = "statistics",
    responses((status = 200, description = "The routes", content(
        (RootBody = "application/json"),
        (String = "text/html"),
    )))
)]
pub(super) async fn root(State(app): State<SharedState>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    if accept.is_some_and(|accept| accept.contains("text/html")) {
        return front_page();
    }
    let endpoints = app.routes.iter().map(|(route, summary)| (route.clone(), summary.clone())).collect();
    let message = format!("{}: statistics and leases of GPUs", app.config.api.title);
    let body = axum::Json(RootBody { message, version: env!("CARGO_PKG_VERSION").into(), endpoints });
    ([(header::VARY, "accept")], body).into_response()
}

/// Returns the front page, which may run and load only its own content and responses of this agent.
fn front_page() -> Response {
    let nonce = random_nonce();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let html = include_str!("page.html").replace(NONCE, &nonce);
    // The policy has only letters, digits and punctuation, so it is a valid header.
    page(html, HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'")))
}

fn random_nonce() -> String {
    let mut bytes = [0_u8; 16];
    // The page never shows foreign text as markup, so it stays safe without random bytes.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    format!("{:032x}", u128::from_le_bytes(bytes))
}

/// Returns a page under a content security policy.
fn page(html: impl Into<Body>, policy: HeaderValue) -> Response {
    let mut response = Response::new(html.into());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A script, style or image of a page.
#[derive(Clone)]
struct PageAsset {
    media_type: &'static str,
    is_compressed: bool,
    bytes: Bytes,
}

impl PageAsset {
    /// Returns the asset as a response. Every browser accepts the compressed form.
    fn response(self) -> Response {
        let mut response = Response::new(Body::from(self.bytes));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.media_type));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("max-age=3600"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if self.is_compressed {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }
}

fn escape_html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

const DOCUMENT: &str = "/openapi.json";
/// Both documentation pages set styles at run time; ReDoc searches in a worker that it creates.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
    img-src 'self' data:; font-src 'self' data:; connect-src 'self'; worker-src blob:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// A page that shows the OpenAPI document.
struct DocumentationPage {
    /// The setting that holds its path.
    setting: &'static str,
    path: String,
    /// The HTML between its title and its end; `HERE` stands for the path of its assets.
    head: &'static str,
    /// The script that starts the page; `DOCUMENT` stands for the path of the document.
    start: &'static str,
    assets: Vec<(&'static str, PageAsset)>,
}

/// Adds the OpenAPI document and its pages, and returns their paths. A page at the path of a route is an error.
pub(super) fn add_documentation(
    mut router: Router<SharedState>,
    mut document: OpenApi,
    api: &ApiSettings,
) -> Result<(Router<SharedState>, Vec<String>), AgentError> {
    add_security(&mut document, api);
    // Texts, numbers and lists can always be written as JSON.
    let text = Bytes::from(serde_json::to_vec(&document).unwrap_or_default());
    let as_json = [(header::CONTENT_TYPE, "application/json")];
    router = router.route(DOCUMENT, get(move || async move { (as_json, text.clone()) }));
    let mut taken: Vec<String> = document.paths.paths.keys().cloned().collect();
    let mut added = vec![DOCUMENT.to_owned()];
    taken.push(DOCUMENT.to_owned());
    for page in [swagger(api), redoc(api)] {
        for (path, method) in page.routes(&api.title) {
            if taken.contains(&path) {
                return Err(AgentError::PageTaken { setting: page.setting, path });
            }
            router = router.route(&path, method);
            taken.push(path.clone());
            added.push(path);
        }
    }
    Ok((router, added))
}

/// Adds the parts of the document that belong to no route.
fn add_security(document: &mut OpenApi, api: &ApiSettings) {
    let bearer = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some(
            "A token (`gpupool token create`). Local callers need none; changes over the network need one.",
        ))
        .build();
    document.components.get_or_insert_default().add_security_scheme("token", SecurityScheme::Http(bearer));
    let no_scopes: [&str; 0] = [];
    document.security = Some(vec![SecurityRequirement::default(), SecurityRequirement::new("token", no_scopes)]);
    if !api.api_prefix.is_empty() {
        document.servers = Some(vec![Server::new(&api.api_prefix)]);
    }
}

fn swagger(api: &ApiSettings) -> DocumentationPage {
    let file = |name| utoipa_swagger_ui::serve(name, Arc::default()).ok().flatten();
    let asset = |name: &'static str, media_type| {
        let (bytes, is_compressed) = match file(name) {
            Some(file) => (static_bytes(file.bytes), file.gzpipped),
            // A test fails if a file is missing.
            None => (Bytes::new(), false),
        };
        (name, PageAsset { media_type, is_compressed, bytes })
    };
    DocumentationPage {
        setting: "api.docs_url",
        path: api.docs_url.clone(),
        head: r#"<link rel="icon" href="HERE/favicon-32x32.png"><link rel="stylesheet" href="HERE/swagger-ui.css"></head>
<body><div id="page"></div><script src="HERE/swagger-ui-bundle.js"></script>"#,
        start: r##"SwaggerUIBundle({ url: "DOCUMENT", dom_id: "#page", deepLinking: true, validatorUrl: null });"##,
        assets: vec![
            asset("swagger-ui-bundle.js", JAVASCRIPT),
            asset("swagger-ui.css", "text/css; charset=utf-8"),
            asset("favicon-32x32.png", "image/png"),
        ],
    }
}

/// Wraps bytes of the binary without a copy.
fn static_bytes(bytes: Cow<'static, [u8]>) -> Bytes {
    match bytes {
        Cow::Borrowed(bytes) => Bytes::from_static(bytes),
        Cow::Owned(bytes) => bytes.into(),
    }
}

fn redoc(api: &ApiSettings) -> DocumentationPage {
    let bytes = Bytes::from_static(include_bytes!("../../assets/redoc/redoc.standalone.js.gz"));
    DocumentationPage {
        setting: "api.redoc_url",
        path: api.redoc_url.clone(),
        head: r#"<link rel="icon" href="data:,"><style>body { margin: 0; }</style></head>
<body><div id="page"></div><script src="HERE/redoc.js"></script>"#,
        start: r#"const family = "system-ui, sans-serif";
const theme = { typography: { fontFamily: family, headings: { fontFamily: family } } };
Redoc.init("DOCUMENT", { theme, hideDownloadButtons: false }, document.getElementById("page"));"#,
        assets: vec![("redoc.js", PageAsset { media_type: JAVASCRIPT, is_compressed: true, bytes })],
    }
}

impl DocumentationPage {
    /// Returns the routes of the page and its assets. All links are relative, so that a proxy may serve it at another path.
    fn routes(&self, title: &str) -> Vec<(String, axum::routing::MethodRouter<SharedState>)> {
        let (above, last) = self.path.rsplit_once('/').unwrap_or_default();
        let up = "../".repeat(above.matches('/').count());
        let head = self.head.replace("HERE", last);
        let html = Bytes::from(format!(
            "<!doctype html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><title>{}</title>\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             {head}<script src=\"{last}/start.js\"></script></body>\n</html>\n",
            escape_html(title)
        ));
        let start = self.start.replace("DOCUMENT", &format!("{up}{}", &DOCUMENT[1..]));
        let start = PageAsset { media_type: JAVASCRIPT, is_compressed: false, bytes: start.into() };
        let shown = get(move || async move { page(html, HeaderValue::from_static(POLICY)) });
        let without_slash = HeaderValue::from_str(&format!("../{last}"));
        let mut routes = vec![(self.path.clone(), shown)];
        for (name, asset) in self.assets.iter().cloned().chain([("start.js", start)]) {
            routes.push((format!("{}/{name}", self.path), get(move || async move { asset.response() })));
        }
        if let Ok(location) = without_slash {
            let redirect = get(move || async move {
                (StatusCode::PERMANENT_REDIRECT, [(header::LOCATION, location)]).into_response()
            });
            routes.push((format!("{}/", self.path), redirect));
        }
        routes
    }
}

//! The documentation of the routes: the OpenAPI document and two pages that show it, working without any network.
//!
//! The scripts of the pages lie compressed in the binary and are sent as they lie there.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderValue, header};
use axum::response::IntoResponse;
use axum::routing::get;
use bytes::Bytes;
use gpupool_config::settings::ApiSettings;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{OpenApi, Server};

use crate::error::AgentError;

use super::Shared;
use super::browser::{Part, escaped, page};

const DOCUMENT: &str = "/openapi.json";
/// Both pages write styles as they go; ReDoc searches in a worker it makes itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
    img-src 'self' data:; font-src 'self' data:; connect-src 'self'; worker-src blob:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// A page that shows the document.
struct Page {
    /// The setting that says where it is.
    setting: &'static str,
    path: String,
    /// What is between its title and its end; `HERE` is where its parts are.
    head: &'static str,
    /// What starts it; `DOCUMENT` is where the document is.
    start: &'static str,
    parts: Vec<(&'static str, Part)>,
}

/// Adds the document and its pages, and says where they are. A page in the place of a route is refused.
pub(super) fn add(
    mut router: Router<Shared>,
    mut document: OpenApi,
    api: &ApiSettings,
) -> Result<(Router<Shared>, Vec<String>), AgentError> {
    complete(&mut document, api);
    // Texts, numbers and lists always have a form in JSON.
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

/// What no route tells of itself.
fn complete(document: &mut OpenApi, api: &ApiSettings) {
    let bearer = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some(
            "A token (`gpupool token create`). Local callers need none; from the network, whatever changes something does.",
        ))
        .build();
    document.components.get_or_insert_default().add_security_scheme("token", SecurityScheme::Http(bearer));
    let no_scopes: [&str; 0] = [];
    document.security = Some(vec![SecurityRequirement::default(), SecurityRequirement::new("token", no_scopes)]);
    if !api.api_prefix.is_empty() {
        document.servers = Some(vec![Server::new(&api.api_prefix)]);
    }
}

fn swagger(api: &ApiSettings) -> Page {
    let file = |name| utoipa_swagger_ui::serve(name, Arc::default()).ok().flatten();
    let part = |name: &'static str, media_type| {
        let (bytes, is_compressed) = match file(name) {
            Some(file) => (lying(file.bytes), file.gzpipped),
            // They are there, or a test fails.
            None => (Bytes::new(), false),
        };
        (name, Part { media_type, is_compressed, bytes })
    };
    Page {
        setting: "api.docs_url",
        path: api.docs_url.clone(),
        head: r#"<link rel="icon" href="HERE/favicon-32x32.png"><link rel="stylesheet" href="HERE/swagger-ui.css"></head>
<body><div id="page"></div><script src="HERE/swagger-ui-bundle.js"></script>"#,
        start: r##"SwaggerUIBundle({ url: "DOCUMENT", dom_id: "#page", deepLinking: true, validatorUrl: null });"##,
        parts: vec![
            part("swagger-ui-bundle.js", JAVASCRIPT),
            part("swagger-ui.css", "text/css; charset=utf-8"),
            part("favicon-32x32.png", "image/png"),
        ],
    }
}

/// Bytes of the binary stay where they lie.
fn lying(bytes: Cow<'static, [u8]>) -> Bytes {
    match bytes {
        Cow::Borrowed(bytes) => Bytes::from_static(bytes),
        Cow::Owned(bytes) => bytes.into(),
    }
}

fn redoc(api: &ApiSettings) -> Page {
    let bytes = Bytes::from_static(include_bytes!("../../assets/redoc/redoc.standalone.js.gz"));
    Page {
        setting: "api.redoc_url",
        path: api.redoc_url.clone(),
        head: r#"<link rel="icon" href="data:,"><style>body { margin: 0; }</style></head>
<body><div id="page"></div><script src="HERE/redoc.js"></script>"#,
        start: r#"const family = "system-ui, sans-serif";
const theme = { typography: { fontFamily: family, headings: { fontFamily: family } } };
Redoc.init("DOCUMENT", { theme, hideDownloadButtons: false }, document.getElementById("page"));"#,
        parts: vec![("redoc.js", Part { media_type: JAVASCRIPT, is_compressed: true, bytes })],
    }
}

impl Page {
    /// The page, its parts, and what starts it. All addresses are relative, so that a proxy may serve it elsewhere.
    fn routes(&self, title: &str) -> Vec<(String, axum::routing::MethodRouter<Shared>)> {
        let (above, last) = self.path.rsplit_once('/').unwrap_or_default();
        let up = "../".repeat(above.matches('/').count());
        let head = self.head.replace("HERE", last);
        let html = Bytes::from(format!(
            "<!doctype html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><title>{}</title>\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             {head}<script src=\"{last}/start.js\"></script></body>\n</html>\n",
            escaped(title)
        ));
        let start = self.start.replace("DOCUMENT", &format!("{up}{}", &DOCUMENT[1..]));
        let start = Part { media_type: JAVASCRIPT, is_compressed: false, bytes: start.into() };
        let shown = get(move || async move { page(html, HeaderValue::from_static(POLICY)) });
        let without_slash = HeaderValue::from_str(&format!("../{last}"));
        let mut routes = vec![(self.path.clone(), shown)];
        for (name, part) in self.parts.iter().cloned().chain([("start.js", start)]) {
            routes.push((format!("{}/{name}", self.path), get(move || async move { part.response() })));
        }
        if let Ok(place) = without_slash {
            let redirect = get(move || async move {
                (axum::http::StatusCode::PERMANENT_REDIRECT, [(header::LOCATION, place)]).into_response()
            });
            routes.push((format!("{}/", self.path), redirect));
        }
        routes
    }
}

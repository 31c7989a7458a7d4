// The dashboard's page and its API under /admin (JSON, same access rule as the OpenAI routes). The JSON is described in
// docs/admin-api.md.
#pragma once

namespace ddtree {

class HttpServer;
class Service;

// Called once before HttpServer::start(). Both outlive the routes.
//   /, /assets/…, /favicon.svg   the page, open to all (it holds no data), under a strict Content-Security-Policy
//   /admin/api/…                 its data, behind --api-key where one is set
// Starts a thread that takes the engine's counters every five seconds for the chart of the last hour; it ends with the routes.
void register_admin_routes(HttpServer& server, Service& service);

}  // namespace ddtree

# ddtree_embedded: files that live inside the executable, found at run time by name through base/embedded.h.
# They go in by .incbin (4 MB in 0.01 s; an array in C++ source takes seconds and hundreds of megabytes).
set(embed_roots migrations)            # folder in the tree = prefix of the embedded name
if(EXISTS ${CMAKE_SOURCE_DIR}/web/package.json)
  # The page is built by Vite; its output is embedded under web/dist/.
  file(GLOB_RECURSE web_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/web/src/* ${CMAKE_SOURCE_DIR}/web/public/*)
  list(APPEND web_sources ${CMAKE_SOURCE_DIR}/web/index.html ${CMAKE_SOURCE_DIR}/web/package.json ${CMAKE_SOURCE_DIR}/web/vite.config.ts)
  set(web_dist ${CMAKE_BINARY_DIR}/web)
  add_custom_command(OUTPUT ${web_dist}/index.html
    COMMAND ${CMAKE_COMMAND} -E env "PATH=${DDTREE_DEPS}/node/node_modules/.bin:$ENV{PATH}" npm --silent --prefix ${CMAKE_SOURCE_DIR}/web run build -- --outDir ${web_dist} --emptyOutDir --logLevel warn
    DEPENDS ${web_sources} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}/web COMMENT "Building the dashboard" VERBATIM)
endif()

set(embed_list ${CMAKE_BINARY_DIR}/embedded.list)
set(embed_asm ${CMAKE_BINARY_DIR}/embedded.S)
file(GLOB_RECURSE embed_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/migrations/*.sql ${CMAKE_SOURCE_DIR}/models/configs/*.json)
list(APPEND embed_files ${CMAKE_SOURCE_DIR}/packaging/systemd/ddtree.service)  # what `ddtree install` writes units from
if(DDTREE_EMBED_PAIR)
  file(GLOB_RECURSE pair_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/models/tiny/target/* ${CMAKE_SOURCE_DIR}/models/tiny/draft/*)
  list(APPEND embed_files ${pair_files})
endif()
set(embed_web_argument)
set(embed_web_depends)
if(web_dist)
  set(embed_web_argument ${web_dist})
  set(embed_web_depends ${web_dist}/index.html)
endif()
string(REPLACE ";" "\n" embed_text "${embed_files}")
file(CONFIGURE OUTPUT ${embed_list} CONTENT "${embed_text}\n" @ONLY)
add_custom_command(OUTPUT ${embed_asm}
  COMMAND python3 ${CMAKE_SOURCE_DIR}/cmake/embed.py ${CMAKE_SOURCE_DIR} ${embed_list} ${embed_asm} ${embed_web_argument}
  DEPENDS ${CMAKE_SOURCE_DIR}/cmake/embed.py ${embed_list} ${embed_files} ${embed_web_depends} COMMENT "Embedding files" VERBATIM)
set_source_files_properties(${embed_asm} PROPERTIES OBJECT_DEPENDS "${embed_files}")
add_library(ddtree_embedded OBJECT ${embed_asm})

"Package metadata, read from settings.ini. Needs setuptools and nothing else (nbdev is not imported)."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(interpolation=None)
config.read(here / 'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
suffix = '_requirements'
extras = {key[:-len(suffix)]: value.split() for key, value in cfg.items() if key.endswith(suffix)}
extras['all'] = sorted({package for packages in extras.values() for package in packages})
readme = here / 'README.md'

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    author=cfg['author'],
    author_email=cfg['author_email'],
    url=cfg['git_url'],
    project_urls={'Documentation': cfg['doc_host'] + cfg['doc_baseurl'] + '/'},
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords=cfg['keywords'].split(),
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Developers',
                 'Intended Audience :: Science/Research', 'Natural Language :: English',
                 'Programming Language :: Python :: 3 :: Only'],
    python_requires='>=' + cfg['min_python'],
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']),
    include_package_data=True,
    install_requires=cfg['requirements'].split(),
    extras_require=extras,
    entry_points={'console_scripts': cfg['console_scripts'].split(),
                  'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    zip_safe=False,
)
